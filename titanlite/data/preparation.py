"""Preparation of steps from the [data] section, in the loader's thread or its workers. Does not import torch."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from titanlite.data.blocks import BlockPieces, Division
from titanlite.data.chat.encoder import ChatEncoder
from titanlite.data.config import DataConfig
from titanlite.data.corpus import TextCorpus, build_encoder
from titanlite.data.order import IndexedPieces, Mixture, Order, Permutation
from titanlite.data.packing import num_sequences
from titanlite.data.segments import Segments, fetched_windows
from titanlite.data.sources.base import Source, StreamedSource, TextSource
from titanlite.data.sources.pieces import Corpus, EpochSize, StreamPieces, TokenPiece
from titanlite.data.sources.stored import size_of
from titanlite.data.sources.tokens import Tokens, WindowCorpus
from titanlite.data.steps import BatchStage, stage_index
from titanlite.data.streams import BadRowPolicy, Origin, SequenceRow, SourceState, SourceStream, piece_lengths
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import DataError, UserError

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Assignment:
    """Settings of the streams of a run, the same on all ranks.

    section: resolved (no -1). tokenizer: Tokenizer.arguments; None if no source is text. stages: of the training, at
    least one. logs: whether skipped rows are logged as warnings.
    """

    section: DataConfig
    tokenizer: dict[str, str] | None
    vocab_size: int
    stages: tuple[BatchStage, ...]
    logs: bool = True

    @property
    def longest(self) -> int:
        """The length of the longest sequences, and of the windows of token files."""
        return max(stage.seq_len for stage in self.stages)

    def stage_of(self, step: int) -> BatchStage:
        return self.stages[stage_index(self.stages, step)]


class SourceOrder(NamedTuple):
    """A source in the order in which streams read it.

    size: in Source.size_unit. description: one line for the log. pieces: of a stream, by its number. locate: file and
    row of a piece, by its ledger number. epoch_size: None if it is unknown; may read a sample. check_unchanged: raises
    UserError if a file that was read has changed.
    """

    size: int
    description: str
    pieces: Callable[[int], StreamPieces]
    locate: Callable[[int], str]
    epoch_size: Callable[[], EpochSize | None] = lambda: None
    check_unchanged: Callable[[], None] = lambda: None


def content_keys(sources: Sequence[Source], tokenizer: Tokenizer | None) -> dict[str, str]:
    """Hashes of the facts about what is read, by key: processes whose hashes are equal read the same."""
    keys = {f"data.sources.{n}.path": source.content_hash for n, source in enumerate(sources)}
    if tokenizer is not None:
        keys |= {"tokenizer.path": tokenizer.fingerprint}
        if any(source.config.is_chat for source in sources):
            keys["tokenizer.chat_template"] = ChatEncoder(tokenizer).fingerprint
    return keys


def bad_row_policy(section: DataConfig, *, logs: bool = True) -> BadRowPolicy:
    """The policy of data.on_bad_row and data.max_bad_rows."""
    return BadRowPolicy(section.on_bad_row == "skip", section.max_bad_rows, logs)


def open_order(source: Source, number: int, assignment: Assignment, tokenizer: Tokenizer | None) -> SourceOrder:
    """Open source `number` of the section in its order. Raises UserError if it is empty."""
    section = assignment.section
    seeds = (section.seed, number) if section.shuffle else ()
    corpus: Corpus
    order: Order | None = None
    epoch_size: Callable[[], EpochSize | None]
    checks = []
    if isinstance(source, Tokens):
        windows = WindowCorpus(source, assignment.longest, assignment.vocab_size, documents=section.masks_documents)
        corpus, epoch_size, checks = windows, windows.epoch_size, [windows.check_unchanged]
        if section.deals_blocks and windows.count:
            order = Segments(windows.count, seeds, num_streams=section.num_streams, seq_len=assignment.longest)
            windows.block = fetched_windows(order.block, assignment.longest)
    else:
        assert tokenizer is not None, "sources of text need a tokenizer"
        encoder = build_encoder(source.config, tokenizer, section)
        if isinstance(source, StreamedSource):
            division = Division(source, section.num_streams, seeds)
            blocks = partial(BlockPieces, division, encoder=encoder, max_piece_bytes=section.max_piece_bytes)
            return SourceOrder(1, division.description, blocks, division.locate)  # a placeholder: the size is unknown
        assert isinstance(source, TextSource)
        texts = TextCorpus([source], section.max_piece_bytes, encoder)
        too_long = source.config.too_long if source.config.is_chat else None

        def count(sample: Sequence[TokenPiece]) -> float:
            lengths = piece_lengths(sample, assignment.longest, too_long)
            return num_sequences(lengths, assignment.longest, section.packing, cuts=too_long is None)

        corpus, epoch_size = texts, partial(texts.epoch_size, count)
    if corpus.size == 0 or corpus.count == 0:
        # Each empty or corrupted file is one piece, whose error names the reason.
        bad = [str(found) for found in corpus.fetch(range(min(1, corpus.count))) if isinstance(found, Exception)]
        remedy = "add data, or set a smaller training.seq_len" if corpus.windows else "add data"
        raise UserError(f"no data to train on: {bad[0] if bad else corpus.description}: {remedy}")
    pieces = partial(
        IndexedPieces,
        corpus,
        order or Permutation(corpus.count, seeds),
        num_streams=section.num_streams,
        name=source.name,
        epochs=source.config.epochs,
    )
    note = f", {source.shuffling_note}" if section.shuffle and source.shuffling_note else ""
    if isinstance(order, Segments) and source.is_stored:
        mixed = order.open_windows / corpus.count * sum(map(size_of, source.files())) / 2**20
        note += f", of which each stream mixes {mixed:,.1f} MiB at a time, in the cache folder"
    return SourceOrder(corpus.size, corpus.description + note, pieces, corpus.locate, epoch_size, *checks)


class PreparedStep(NamedTuple):
    """The sequences of some streams in a step, ordered by sequence number, and the states of the streams after it.

    tokens, labels, positions: (rows, seq_len); positions is None without data.document_mask. lengths: (rows, 1), see
    Batch. origins: (rows, fields of Origin). states: (streams, values of a stream's state). ended: (sources,), 1 if a
    source is exhausted in all of these streams.
    """

    tokens: Int64s
    labels: Int64s
    lengths: Int64s
    origins: Int64s
    states: Int64s
    ended: Int64s
    positions: Int64s | None = None


class Preparation:
    """Prepares the sequences of `streams` step by step. Builds missing indexes.

    A stream reads each source through a SourceStream; the mixture selects the source of each of its sequences. The
    state of a stream is the SourceState fields of all sources, one source after the other.

    sources: the tables of [data] or [validation]. tokenizer: None if no source is text. streams: stream numbers,
    ascending. mixtures: the shares of the sources, by stage. description: one line for all sources. content: see
    content_keys. last_step: the last one that was prepared.
    """

    def __init__(
        self,
        assignment: Assignment,
        sources: Sequence[Source],
        tokenizer: Tokenizer | None,
        streams: Sequence[int],
        content: dict[str, str] | None = None,
    ) -> None:
        """content: that of the loader, in its worker. Raises UserError if a source is empty, or has other content."""
        section = assignment.section
        self.content = content_keys(sources, tokenizer)  # before the files are opened
        if changed := [key for key, value in (content or {}).items() if self.content[key] != value]:
            raise UserError(
                f"{', '.join(changed)}: files were added, removed or written while the run was starting; start again "
                "when they are complete"
            )
        self._assignment = assignment
        self._policy = bad_row_policy(section, logs=assignment.logs)
        self._orders = [open_order(source, n, assignment, tokenizer) for n, source in enumerate(sources)]
        weights = [source.weight for source in section.sources]
        weights = [order.size for order in self._orders] if -1 in weights else weights
        self.mixtures = [Mixture(stage.weights or weights, seed=section.seed) for stage in assignment.stages]
        self.description = "; ".join(self._described())
        self._streams = {number: self._open_stream(number) for number in streams}
        self.last_step, self.next_sequence = 0, 0

    def _described(self) -> Iterator[str]:
        for order, share in zip(self._orders, self.mixtures[0].shares, strict=True):
            yield order.description + (f", {share:.2%} of the sequences" if len(self._orders) > 1 else "")

    def _open_stream(self, number: int) -> list[SourceStream]:
        """Stream `number` of the section's num_streams streams, for each source."""
        return [
            SourceStream(
                order.pieces(number),
                packing=self._assignment.section.packing,
                policy=self._policy,
                too_long=source.too_long if source.is_chat else None,
                first_window=(number + 1) / self._assignment.section.num_streams,
            )
            for order, source in zip(self._orders, self._assignment.section.sources, strict=True)
        ]

    def locate(self, origin: Origin) -> str:
        """File and row of a sequence's first token, for messages."""
        return "no data left" if origin.piece < 0 else self._orders[origin.source].locate(origin.piece)

    def epoch_sizes(self) -> list[EpochSize | None]:
        """For each source, the size of an epoch; None if it is unknown. Reads a sample of text."""
        return [order.epoch_size() for order in self._orders]

    def load_state(self, states: Int64s, next_sequence: int, last_step: int) -> None:
        """Continue after the step `last_step`, at sequence `next_sequence` of the run. states: (streams, values).
        Raises UserError."""
        for stream, of_stream in zip(self._streams.values(), _source_states(states), strict=True):
            for source, state in zip(stream, of_stream, strict=True):
                source.load_state(state)
        self.last_step, self.next_sequence = last_step, next_sequence

    def states(self) -> Int64s:
        """Current states: (streams, values of a stream's state)."""
        states = [[source.state() for source in stream] for stream in self._streams.values()]
        return np.array(states, np.int64).reshape(len(states), -1)

    def epochs(self, states: Int64s) -> list[float]:
        """For each source, the part that these streams have read at `states`, see StreamPieces.epochs."""
        parts = [
            [source.epochs(state) for source, state in zip(stream, of_stream, strict=True)]
            for stream, of_stream in zip(self._streams.values(), _source_states(states), strict=True)
        ]
        return [sum(of_streams) for of_streams in zip(*parts, strict=True)]

    def ended(self) -> Int64s:
        """(sources,): 1 if the source is exhausted in all of these streams."""
        ended = [[source.ended for source in stream] for stream in self._streams.values()]
        found: Int64s = np.array(ended, np.int64).min(axis=0)
        return found

    def step(self) -> PreparedStep:
        """Prepare the sequences of these streams among those of the run's next step. Raises DataError."""
        sequences, stage = self.next_step()
        first = sequences.start
        own = sequences_of(self._streams, self._assignment.section.num_streams, sequences)
        shape = (len(own), stage.seq_len)
        tokens, labels = np.empty(shape, np.int64), np.empty(shape, np.int64)
        positions = np.empty(shape, np.int64) if self._assignment.section.masks_documents else None
        lengths = np.empty((len(own), 1), np.int64)
        origins = np.empty((len(own), len(Origin._fields)), np.int64)
        for place, sequence in enumerate(own):
            own_positions = None if positions is None else positions[place]
            row = SequenceRow(tokens[place], labels[place], own_positions, lengths[place])
            try:
                origins[place] = self._next_sequence(sequence % self._assignment.section.num_streams, row)
            except UserError as error:
                raise DataError(str(error), sequence) from error
        try:
            for order in self._orders:
                order.check_unchanged()  # after reading: no step has tokens of a file that had changed
        except UserError as error:
            raise DataError(str(error), first) from error
        return PreparedStep(tokens, labels, lengths, origins, self.states(), self.ended(), positions)

    def next_step(self) -> tuple[range, BatchStage]:
        """Go on to the next step; returns its sequences and its stage."""
        self.last_step += 1
        first, stage = self.next_sequence, self._assignment.stage_of(self.last_step)
        self.next_sequence = first + stage.global_batch_size
        return range(first, self.next_sequence), stage

    def _next_sequence(self, number: int, row: SequenceRow) -> Origin:
        """Write the next sequence of stream `number` into `row`. Raises UserError."""
        stream, mixture = self._streams[number], self.mixtures[stage_index(self._assignment.stages, self.last_step)]
        source = mixture.source(number, sum(source.sequences for source in stream))
        return Origin(source, *stream[source].next_sequence(row))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def _source_states(states: Int64s) -> list[list[SourceState]]:
    """For each stream, the state of each source. states: (streams, values of a stream's state)."""
    by_source = states.reshape(len(states), -1, len(SourceState._fields)).tolist()
    return [[SourceState(*values) for values in of_stream] for of_stream in by_source]


def sequences_of(streams: Collection[int], num_streams: int, sequences: range) -> list[int]:
    """The `sequences` of the run that come from these streams."""
    return [sequence for sequence in sequences if sequence % num_streams in streams]
