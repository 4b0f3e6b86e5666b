"""What the commands share that read a configuration's documents: its arguments, its text, its bad rows."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

from titanlite.config.load import parse_config
from titanlite.config.schema import JobConfig
from titanlite.data.check import check_data, check_tokenizer
from titanlite.data.config import PIECE_BYTES_PER_POSITION, DataConfig
from titanlite.data.corpus import Texts
from titanlite.data.kinds import open_source, text_sources
from titanlite.data.preparation import bad_row_policy
from titanlite.data.sources.pieces import BadRowError
from titanlite.models.registry import resolve_model
from titanlite.runtime.errors import ConfigError, Problem

T = TypeVar("T")


def parse_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str], *, needs_tokenizer: bool, reads_tokens: bool = False
) -> tuple[argparse.Namespace, JobConfig]:
    """The command's own arguments, and the configuration: CONFIG, then --section.key value. Raises ConfigError.

    reads_tokens: the command trains on the data, as it were: any source will do, and the tokens have to suit the model.
    """
    parser.add_argument("config", metavar="CONFIG", help="TOML file, as for training")
    parser.epilog = "--section.key value overrides a key of CONFIG, as for training."
    own, rest = parser.parse_known_args(argv)
    config, problems = parse_config(["--job.config_file", own.config, *rest])
    if not problems:  # with defaults in place of wrong values, what follows might complain about those
        data, vocab_size = config.data, resolve_model(config.model)[1].vocab_size
        room = vocab_size if reads_tokens else 0
        problems = check_data(data, global_batch_size=0, data_degree=0, vocab_size=room)
        problems = problems or ([] if reads_tokens else _check_text(data))
        if needs_tokenizer:
            # A tokenizer that is there needs no room in this model; one that is trained is made to fit it.
            room = vocab_size if reads_tokens or not config.tokenizer.path else 0
            problems += check_tokenizer(config.tokenizer, sources=data.sources, vocab_size=room, add_bos=data.add_bos)
    if problems:
        raise ConfigError(problems)
    return own, config


def _check_text(section: DataConfig) -> list[Problem]:
    """Sources that a command cannot read which goes through documents one by one."""
    rule, remedy = "a source of text: this command reads no tokens", "give it the configuration of the text"
    opened = [open_source(source) for source in section.sources]
    keys = [f"data.sources.{n}.kind" for n, source in enumerate(opened) if source.holds == "tokens"]
    return [Problem(key, "tokens", rule, remedy) for key in keys]


def open_texts(config: JobConfig) -> Texts:
    """The sources' text, cut into the pieces of training."""
    return Texts(text_sources(config.data.sources), piece_bytes(config))


def piece_bytes(config: JobConfig) -> int:
    """The size of the pieces of training, where the configuration is not resolved."""
    size = config.data.max_piece_bytes
    return PIECE_BYTES_PER_POSITION * config.training.seq_len if size == -1 else size


def pieces_with_progress(texts: Texts, what: str, first: int = 0) -> Iterator[int]:
    """All pieces in source order from `first` on, with a progress bar called `what` where stderr is a terminal."""
    pieces = range(sum(texts.counts))
    total = sum(texts.num_bytes(piece) for piece in pieces) if sys.stderr.isatty() else None
    done = sum(texts.num_bytes(piece) for piece in pieces[:first]) if sys.stderr.isatty() else 0
    with tqdm(total=total, initial=done, unit="B", unit_scale=True, desc=what, disable=not sys.stderr.isatty()) as bar:
        for piece in pieces[first:]:
            yield piece
            bar.update(texts.num_bytes(piece))


class UsableRows:
    """Lets results pass that can be used; bad rows are raised or counted as data.on_bad_row says. Raises UserError.

    bad_rows: how many there were before.
    """

    def __init__(self, section: DataConfig, bad_rows: int = 0) -> None:
        self._policy = bad_row_policy(section)
        self.bad_rows = bad_rows
        """How many there were so far."""

    def of(self, results: Iterable[T | Exception]) -> Iterator[T]:
        for result in results:
            if isinstance(result, Exception):
                self.check(result)
            else:
                yield result

    def check(self, error: Exception) -> None:
        """Name and count a bad row that is skipped; raise anything else."""
        if not isinstance(error, BadRowError):
            raise error
        self.bad_rows += 1
        self._policy.check(error, self.bad_rows)
        tqdm.write(f"skipped a bad row: {error}", file=sys.stderr)  # above the progress bar
