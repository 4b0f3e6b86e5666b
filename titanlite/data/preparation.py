"""Preparation of steps from the [data] section, in the loader's thread or its workers. Does not import torch."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from titanlite.data.blocks import BlockOrder, Division
from titanlite.data.config import DataConfig
from titanlite.data.corpus import Encoder, TextCorpus, Texts
from titanlite.data.indexed import IndexedOrder
from titanlite.data.order import Mixture, Permutation
from titanlite.data.sources.base import Source, StreamedSource, TextSource, TokenSource
from titanlite.data.sources.pieces import Corpus, StreamPieces
from titanlite.data.streams import BadRowPolicy, Origin, Row, SourceStream, Stream
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import DataError, UserError

Int64s = npt.NDArray[np.int64]


class SourceOrder(Protocol):
    """A source in the order in which streams read it. size: in Source.size_unit. description: one line for the log."""

    name: str
    size: int
    description: str

    def pieces(self, stream: int, num_streams: int) -> StreamPieces:
        """The pieces of one stream."""
        ...


class Sources:
    """All sources of a [data] section. `section` is resolved (no -1). Builds the indexes of sources that have none.

    mixture: the shares of the sources. description: one line for all sources. tokenizer: None if no source is text.
    logs: whether skipped rows are logged as warnings. Raises UserError if a source is empty.
    """

    def __init__(
        self,
        section: DataConfig,
        sources: Sequence[Source],
        tokenizer: Tokenizer | None,
        *,
        seq_len: int,
        vocab_size: int,
        logs: bool = True,
    ) -> None:
        self._section = section
        self._policy = replace(bad_row_policy(section), logs=logs)
        self._seq_len = seq_len
        self._open = [
            open_order(source, n, section, tokenizer, seq_len=seq_len, vocab_size=vocab_size)
            for n, source in enumerate(sources)
        ]
        weights = [source.weight for source in section.sources]
        self.mixture = Mixture([source.size for source in self._open] if -1 in weights else weights, seed=section.seed)
        self.description = "; ".join(self._described())

    def _described(self) -> Iterator[str]:
        for source, share in zip(self._open, self.mixture.shares, strict=True):
            yield source.description + (f", {share:.2%} of the sequences" if len(self._open) > 1 else "")

    def stream(self, number: int) -> Stream:
        """Stream `number` of the section's num_streams streams."""
        section = self._section
        sources = [
            SourceStream(
                source.pieces(number, section.num_streams),
                seq_len=self._seq_len,
                packing=section.packing,
                policy=self._policy,
            )
            for source in self._open
        ]
        return Stream(number, sources, self.mixture)


def bad_row_policy(section: DataConfig) -> BadRowPolicy:
    """The policy of data.on_bad_row and data.max_bad_rows."""
    return BadRowPolicy(section.on_bad_row == "skip", section.max_bad_rows)


def open_order(
    source: Source,
    number: int,
    section: DataConfig,
    tokenizer: Tokenizer | None,
    *,
    seq_len: int,
    vocab_size: int,
) -> SourceOrder:
    """Open source `number` of the section in its order. Raises UserError if it is empty."""
    seeds = (section.seed, number)
    corpus: Corpus
    if isinstance(source, TokenSource):
        corpus = source.windows(seq_len, vocab_size, documents=section.document_mask)
    else:
        assert tokenizer is not None, "sources of text need a tokenizer"
        encoder = Encoder(tokenizer, add_bos=section.add_bos, add_eos=section.add_eos)
        if isinstance(source, StreamedSource) and source.is_streamed:
            division = Division(source, section.num_streams, seeds if section.shuffle else None)
            return BlockOrder(division, encoder, max_piece_bytes=section.max_piece_bytes)
        assert isinstance(source, TextSource)
        corpus = TextCorpus(Texts([source], section.max_piece_bytes), encoder)
    if corpus.size == 0 or corpus.count == 0:
        # Each empty or corrupted file is one piece, whose error names the reason.
        bad = [str(found) for found in corpus.fetch(range(min(1, corpus.count))) if isinstance(found, Exception)]
        remedy = "add data, or set a smaller training.seq_len" if corpus.windows else "add data"
        raise UserError(f"no data to train on: {bad[0] if bad else corpus.description}: {remedy}")
    permutation = Permutation(corpus.count, seeds=seeds, shuffle=section.shuffle)
    opened = IndexedOrder(corpus, permutation, name=source.name, epochs=source.config.epochs)
    if section.shuffle and source.shuffling_note:
        opened.description += f", {source.shuffling_note}"
    return opened


class PreparedStep(NamedTuple):
    """The sequences of some streams in one optimizer step, in the order of the run, and the streams' states after it.

    tokens, labels, positions: (rows, seq_len); positions is None without data.document_mask. origins: (rows, fields of
    Origin). states: (streams, values of a stream's state). ended: (sources,), 1 if a source is exhausted in all of
    these streams.
    """

    tokens: Int64s
    labels: Int64s
    origins: Int64s
    states: Int64s
    ended: Int64s
    positions: Int64s | None = None


class Preparation:
    """Prepares the sequences of `streams` step by step. streams: stream numbers, ascending."""

    def __init__(
        self,
        sources: Sources,
        streams: Sequence[int],
        *,
        num_streams: int,
        seq_len: int,
        global_batch_size: int,
        with_positions: bool,
    ) -> None:
        self._streams = {number: sources.stream(number) for number in streams}
        self._num_streams = num_streams
        self._seq_len = seq_len
        self._global_batch_size = global_batch_size
        self._with_positions = with_positions
        self.next_sequence = 0

    def load_state(self, states: Int64s, next_sequence: int) -> None:
        """Continue at sequence `next_sequence` of the run. states: (streams, values). Raises UserError."""
        for stream, values in zip(self._streams.values(), states.tolist(), strict=True):
            stream.load_state(values)
        self.next_sequence = next_sequence

    def states(self) -> Int64s:
        """Current states: (streams, values of a stream's state)."""
        return np.array([stream.state() for stream in self._streams.values()], np.int64)

    def ended(self) -> Int64s:
        """(sources,): 1 if the source is exhausted in all of these streams."""
        ended: Int64s = np.array([stream.ended for stream in self._streams.values()], np.int64).min(axis=0)
        return ended

    def step(self) -> PreparedStep:
        """Prepare the sequences of these streams among the next global_batch_size of the run. Raises DataError."""
        first = self.next_sequence
        self.next_sequence = first + self._global_batch_size
        own = sequences_of(self._streams, self._num_streams, range(first, self.next_sequence))
        shape = (len(own), self._seq_len)
        tokens, labels = np.empty(shape, np.int64), np.empty(shape, np.int64)
        positions = np.empty(shape, np.int64) if self._with_positions else None
        origins = np.empty((len(own), len(Origin._fields)), np.int64)
        for place, sequence in enumerate(own):
            row = Row(tokens[place], labels[place], None if positions is None else positions[place])
            try:
                origins[place] = self._streams[sequence % self._num_streams].next_sequence(row)
            except UserError as error:
                raise DataError(str(error), sequence) from error
        return PreparedStep(tokens, labels, origins, self.states(), self.ended(), positions)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def sequences_of(streams: Collection[int], num_streams: int, sequences: range) -> list[int]:
    """The `sequences` of the run that come from these streams."""
    return [sequence for sequence in sequences if sequence % num_streams in streams]
