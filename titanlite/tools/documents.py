"""Parts of the commands that read a configuration's documents: its checks, its text."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from titanlite.config.check import apply_stores, start_model
from titanlite.config.conventions import with_conventions
from titanlite.config.load import parse, without_consequences
from titanlite.config.schema import JobConfig
from titanlite.data.check import check_data, check_tokenizer
from titanlite.data.config import PIECE_BYTES_PER_POSITION, DataConfig
from titanlite.data.corpus import TextCorpus
from titanlite.data.kinds import open_source
from titanlite.data.sources.config import CHAT
from titanlite.runtime.errors import Problem, raise_problems
from titanlite.runtime.progress import tqdm


def config_of_data(
    options: Any,
    overrides: Sequence[str],
    problems: Sequence[Problem],
    *,
    needs_tokenizer: bool,
    reads_tokens: bool = False,
    reads_chat: bool = True,
) -> JobConfig:
    """The configuration of a command that reads its data: options.config, then --section.key value.

    problems: of the options. Raises ConfigError with them and those of the configuration. reads_tokens: the command
    reads data as training does: any kind of source is valid, and the vocabulary must fit the model. reads_chat: sources
    of conversations are valid.
    """
    parsed = parse(["--job.config_file", options.config, *overrides])
    config, problems = parsed.config, [*parsed.problems, *problems]
    if parsed.file_is_read:
        apply_stores(config)
        config = with_conventions(config)
        data, vocab_size = config.data, config.hyper_parameters.vocab_size
        room = vocab_size if reads_tokens else 0
        found = check_data(data, global_batch_size=0, data_degree=0, vocab_size=room)
        found = found or ([] if reads_tokens else _check_text(data, reads_chat=reads_chat))
        if needs_tokenizer:
            # An existing tokenizer may be larger than this model's vocabulary; one that is trained here must fit it.
            room = vocab_size if reads_tokens or not config.tokenizer.path else 0
            found += check_tokenizer(config.tokenizer, data, vocab_size=room, model=start_model(config))
        problems += without_consequences(found, parsed.problems)
    raise_problems(problems)
    return config


def _check_text(section: DataConfig, *, reads_chat: bool) -> list[Problem]:
    """Problems of sources that a command cannot read document by document."""
    if not reads_chat and (chats := [n for n, source in enumerate(section.sources) if source.is_chat]):
        rule = "a source of documents: token files do not say which tokens are trained on"
        remedy = "train on the conversations themselves: they are tokenized during training"
        return [Problem(f"data.sources.{n}.kind", CHAT, rule, remedy) for n in chats]
    rule = "a source of text: this command does not read token files"
    remedy = "pass a CONFIG with the text from which the token files were written"
    opened = [open_source(source) for source in section.sources]
    keys = [f"data.sources.{n}.kind" for n, source in enumerate(opened) if source.holds == "tokens"]
    return [Problem(key, "tokens", rule, remedy) for key in keys]


def piece_bytes(config: JobConfig) -> int:
    """Maximum bytes of a piece: data.max_piece_bytes, with -1 replaced by its default."""
    size = config.data.max_piece_bytes
    return PIECE_BYTES_PER_POSITION * config.training.seq_len if size == -1 else size


def pieces_with_progress(texts: TextCorpus, what: str) -> Iterator[int]:
    """All pieces in source order, with a progress bar labeled `what` if stderr is a terminal."""
    pieces = range(texts.count)
    total = sum(texts.num_bytes(piece) for piece in pieces) if sys.stderr.isatty() else None
    with tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=not sys.stderr.isatty()) as bar:
        for piece in pieces:
            yield piece
            bar.update(texts.num_bytes(piece))
