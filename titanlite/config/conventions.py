"""What a run takes over from the model or the token files that it starts from, if it does not say."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from titanlite.checkpoint.preflight import initial_config
from titanlite.config.check import start_model, with_model_tokenizer
from titanlite.config.schema import JobConfig
from titanlite.data.bpe import kept_tokenizer
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.formats import CHECKED_TOKENS, open_starts, open_tokens
from titanlite.data.sources.tokens import Tokens
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.tokenizer_files import TOKENIZER_JSON, tokenizer_file
from titanlite.runtime.errors import UserError

SEEN_FILES = 16
"""Token files of a source whose documents show whether they begin with BOS: a stored one takes a request."""


def with_conventions(config: JobConfig) -> JobConfig:
    """The configuration of a new run with the tokenizer of the model that it starts from, if it names none, and with
    data.add_bos, see bos_of_start. It stays "auto" if a file that tells cannot be read.
    """
    config = with_model_tokenizer(config)
    if config.data.add_bos != "auto":
        return config
    try:
        found = bos_of_start(config)
    except UserError:
        return config
    return replace(config, data=replace(config.data, add_bos=found))


def bos_of_start(config: JobConfig) -> bool:
    """Whether the documents of the token files begin with BOS or, if no token file shows it, whether those did that the
    model was trained on that the run starts from. Raises UserError."""
    found = bos_by_source(config)
    return all(found.values()) if found else _bos_of_model(config)


def _bos_of_model(config: JobConfig) -> bool:
    """Whether the model that the run starts from was trained on documents that begin with BOS."""
    if folder := start_model(config):
        own, file = _tokenizer(config), Path(folder, TOKENIZER_JSON)
        if own is None or own.bos_id is None:
            return False
        return (Tokenizer(file) if file.is_file() else own).adds_bos
    return bool(initial_config(config.checkpoint).get("data", {}).get("add_bos", False))


def bos_by_source(config: JobConfig) -> dict[str, bool]:
    """Whether documents begin with BOS, by the folder of the tokens.json that says so; if none does, by the path of the
    token files that show it. Raises UserError."""
    sources = [source for source in config.data.sources if source.kind == Tokens.kind]
    written = {
        str(folder): bool(manifest["settings"]["add_bos"])
        for source in sources
        for folder, manifest in Tokens(source).manifests().items()
        if "add_bos" in manifest["settings"]
    }
    tokenizer = _tokenizer(config) if sources and not written else None
    if tokenizer is None or tokenizer.bos_id is None:
        return written
    shown = {source.path: _begins_with(source, tokenizer.bos_id) for source in sources}
    return {path: begins for path, begins in shown.items() if begins is not None}


def _begins_with(source: SourceConfig, token_id: int) -> bool | None:
    """Whether each document at the start of the first token files begins with this token; None without known ones."""
    opened = Tokens(source)
    if not opened.has_documents:
        return None
    for file in opened.files()[:SEEN_FILES]:
        tokens = open_tokens(file, source.dtype)
        head = tokens.read(0, min(CHECKED_TOKENS, len(tokens)))
        starts = open_starts(file, tokens, source.eos).between(0, len(head))
        if not np.all(head[starts] == token_id):
            return False
    return True


def _tokenizer(config: JobConfig) -> Tokenizer | None:
    """That of the run; if it has none, since its sources hold tokens, that of the model that it starts from."""
    section = config.tokenizer
    file = tokenizer_file(section.path) if section.path else kept_tokenizer(config.data.sources)
    if file is None and (folder := start_model(config)):
        file = Path(folder, TOKENIZER_JSON)
    return Tokenizer(file, bos=section.bos, eos=section.eos) if file is not None and file.is_file() else None
