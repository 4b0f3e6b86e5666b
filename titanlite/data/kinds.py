"""The registry of kinds of sources."""

import os
from collections.abc import Sequence
from dataclasses import replace

from titanlite.data.chat.source import Chat
from titanlite.data.sources.base import Source, TextSource
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.hf import ConvertedDataset, StreamedDataset
from titanlite.data.sources.jsonl import Jsonl
from titanlite.data.sources.parquet import Parquet
from titanlite.data.sources.python_stdlib import PythonStdlib
from titanlite.data.sources.tables import Arrow, Csv
from titanlite.data.sources.text import Text
from titanlite.data.sources.tokens import MANIFEST, Tokens
from titanlite.runtime.errors import Problem

KINDS: dict[str, type[Source]] = {
    Text.kind: Text,
    Jsonl.kind: Jsonl,
    Chat.kind: Chat,
    Parquet.kind: Parquet,
    Csv.kind: Csv,
    Arrow.kind: Arrow,
    StreamedDataset.kind: StreamedDataset,
    Tokens.kind: Tokens,
    PythonStdlib.kind: PythonStdlib,
}


def open_source(config: SourceConfig) -> Source:
    """Open the source of a table."""
    if config.kind == ConvertedDataset.kind and not config.streaming:
        return ConvertedDataset(config)
    return KINDS[config.kind](config)


def text_sources(configs: Sequence[SourceConfig]) -> list[TextSource]:
    """Open the sources of tables, all of which must hold text. Datasets of the hub are converted, not streamed."""
    opened = [open_source(replace(config, streaming=False)) for config in configs]
    assert all(isinstance(source, TextSource) for source in opened)
    return [source for source in opened if isinstance(source, TextSource)]


def source_names(configs: Sequence[SourceConfig]) -> tuple[str, ...]:
    """Unique names of the sources; a number is appended to repeated names."""
    names: list[str] = []
    for config in configs:
        name = open_source(config).name
        same = (f"{name} {number}" if number > 1 else name for number in range(1, len(configs) + 1))
        names.append(next(candidate for candidate in same if candidate not in names))
    return tuple(names)


def source_from_path(path: str, key: str) -> SourceConfig | Problem:
    """The source of a file, a folder or a glob; its kind follows from the suffixes of the files.

    Returns a Problem of `key` if no file matches or the files are not of one kind.
    """
    selected = Text(SourceConfig(Text.kind, path))
    if problems := selected.check_folder(key):
        return problems[0]
    if selected.is_stored:
        has_manifest = selected.is_folder and selected.listing.facts(selected.listing.base / MANIFEST) is not None
    else:
        has_manifest = os.path.isfile(os.path.join(path, MANIFEST))
    if has_manifest:
        return SourceConfig(Tokens.kind, path)
    # The suffixes of conversations are those of documents in JSON lines, whose check names the kind chat.
    known = [kind for kind in KINDS.values() if kind.needs_path and kind.suffixes and kind is not Chat]
    if selected.is_folder:
        found = {kind: kind(SourceConfig(kind.kind, path)) for kind in known}
        kinds = [kind for kind in known if found[kind].files()]
        if len(kinds) > 1 and isinstance(tokens := found[Tokens], Tokens):  # a .csv.gz of documents is no table
            beside = {*tokens.documents_files()}
            kinds = [kind for kind in kinds if not beside.issuperset(found[kind].files())]
    else:
        files = [str(file).lower() for file in selected.files()]
        if not files:
            remedy = f"no regular file matches {os.path.join(os.getcwd(), path)}: fix the path"
            return Problem(key, path, "a file, a folder or a glob that matches files", remedy)
        kinds = [kind for kind in known if any(file.endswith(kind.suffixes) for file in files)]
    if len(kinds) == 1:
        return SourceConfig(kinds[0].kind, path)
    rule = f"files of one kind: {', '.join(suffix for kind in known for suffix in kind.suffixes)}"
    other = "--validation.sources.0.kind KIND --validation.sources.0.path PATH"
    remedy = "select files of one kind with a glob" if kinds else f"write {other} instead of {key}"
    these = " and ".join(kind.kind for kind in kinds) or "of no known kind"
    return Problem(key, path, f"{rule}; these are {these}", remedy)
