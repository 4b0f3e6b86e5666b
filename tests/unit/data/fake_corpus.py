"""A corpus of numbered tokens, and an independent computation of the sequences that its streams must yield."""

from collections.abc import Iterator, Sequence
from itertools import count, islice

import numpy as np

from titanlite.batch import IGNORE_INDEX
from titanlite.data.order import IndexedPieces, Order, Permutation
from titanlite.data.packing import Packing
from titanlite.data.segments import BLOCK_TOKENS, Segments
from titanlite.data.sources.pieces import AT_BEGIN, BadRowError, TokenPiece
from titanlite.data.streams import BadRowPolicy, SequenceRow, SourceStream, TooLong

PAD = 0


class FakeCorpus:
    """Piece p has lengths[p] tokens, and all tokens of the corpus are different. A length of None is a bad row.

    is_dealt: whether the order is that of windows of token files, Segments.
    """

    windows = False
    is_dealt = False
    size = 1
    description = "a fake corpus"

    def __init__(self, lengths: Sequence[int | None]) -> None:
        self.count = len(lengths)
        self.fetched: list[int] = []
        numbers = count(1)
        self.tokens: list[list[int] | None] = [
            None if length is None else [next(numbers) for _ in range(length)] for length in lengths
        ]

    def prepare(self, pieces: Sequence[int]) -> None: ...

    def ahead(self, pieces: Iterator[int], num_tokens: int) -> list[int]:  # noqa: ARG002
        return list(islice(pieces, 3))

    def fetch(self, pieces: Sequence[int]) -> list[TokenPiece | Exception]:
        self.fetched += pieces
        found = [self.tokens[piece] for piece in pieces]
        return [
            BadRowError(f"row {piece} is bad") if ids is None else TokenPiece(np.array(ids, np.int64), AT_BEGIN)
            for piece, ids in zip(pieces, found, strict=True)
        ]


def order_of(corpus: FakeCorpus, num_streams: int = 1) -> Order:
    if corpus.is_dealt:
        return Segments(corpus.count, (3, 0), num_streams=num_streams, seq_len=BLOCK_TOKENS // 4)
    return Permutation(corpus.count, (3, 0), block_pieces=8)


def piece_at(corpus: FakeCorpus, number: int, num_streams: int = 1) -> int:
    """The piece at position `number` of the concatenated orders of all epochs."""
    return int(order_of(corpus, num_streams).pieces(*divmod(number, corpus.count), num_streams)[0])


class SizedStream(SourceStream):
    """A stream whose sequences have one length."""

    seq_len = 0


def make_stream(
    corpus: FakeCorpus,
    *,
    stream: int,
    num_streams: int,
    seq_len: int,
    epochs: int,
    limit: int = 10**6,
    packing: Packing = "concatenate",
    too_long: TooLong | None = None,
) -> SizedStream:
    order = order_of(corpus, num_streams)
    pieces = IndexedPieces(corpus, order, stream, num_streams=num_streams, name="fake", epochs=epochs)
    policy = BadRowPolicy(skip=True, limit=limit)
    made = SizedStream(pieces, packing=packing, policy=policy, too_long=too_long)
    made.seq_len = seq_len
    return made


def empty_row(seq_len: int, *, positions: bool = False) -> SequenceRow:
    tokens, labels, places = np.full((3, seq_len), -7)
    return SequenceRow(tokens, labels, places if positions else None, np.array([-7]))


def expected_sequences(
    corpus: FakeCorpus, *, stream: int, num_streams: int, seq_len: int, epochs: int, sequences: int
) -> list[tuple[list[int], list[int]]]:
    """The first (inputs, labels) of a stream that ends after `epochs`: its tokens in a row, cut at stride seq_len."""
    row: list[int] = []
    for number in range(stream, epochs * corpus.count, num_streams):
        if len(row) > sequences * seq_len:
            break
        row += corpus.tokens[piece_at(corpus, number, num_streams)] or []
    result = []
    for begin in range(0, sequences * seq_len, seq_len):
        part = row[begin : begin + seq_len + 1]
        if len(part) < 2:
            part = []
        inputs = [*part[:seq_len], *[PAD] * (seq_len - len(part))]
        labels = [*part[1:], *[IGNORE_INDEX] * (seq_len - max(0, len(part) - 1))]
        result.append((inputs, labels))
    return result
