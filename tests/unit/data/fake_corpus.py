"""A corpus of numbers, and an independent account of what its streams have to yield."""

from collections.abc import Sequence
from itertools import count

import numpy as np

from titanlite.data.corpus import Tokens
from titanlite.data.permutation import Permutation
from titanlite.data.pieces import BadRowError
from titanlite.data.streams import BadRowPolicy, Stream
from titanlite.loss import IGNORE_INDEX

PAD = 0


class FakeCorpus:
    """Piece p holds lengths[p] tokens, all of them different from all others; length None is a bad row."""

    packed = True
    description = "a fake corpus"

    def __init__(self, lengths: Sequence[int | None]) -> None:
        self.counts = (len(lengths),)
        self.fetched: list[int] = []
        numbers = count(1)
        self.tokens: list[list[int] | None] = [
            None if length is None else [next(numbers) for _ in range(length)] for length in lengths
        ]

    def ahead(self, pieces: Sequence[int], num_tokens: int) -> int:  # noqa: ARG002
        return min(3, len(pieces))

    def fetch(self, pieces: Sequence[int]) -> list[Tokens | Exception]:
        self.fetched += pieces
        found = [self.tokens[piece] for piece in pieces]
        return [
            BadRowError(f"row {piece} is bad") if ids is None else np.array(ids, np.int64)
            for piece, ids in zip(pieces, found, strict=True)
        ]


def make_stream(
    corpus: FakeCorpus, *, stream: int, num_streams: int, seq_len: int, epochs: int | None, limit: int = 10**6
) -> Stream:
    permutation = Permutation(corpus.counts, seed=3, shuffle=True, block_pieces=8)
    policy = BadRowPolicy(skip=True, limit=limit)
    return Stream(
        corpus,
        permutation,
        stream=stream,
        num_streams=num_streams,
        seq_len=seq_len,
        epochs=epochs,
        policy=policy,
    )


def expected_sequences(
    corpus: FakeCorpus, *, stream: int, num_streams: int, seq_len: int, epochs: int, sequences: int
) -> list[tuple[list[int], list[int]]]:
    """The first `sequences` of a stream that ends after `epochs`: all its tokens in a row, cut at stride seq_len."""
    permutation = Permutation(corpus.counts, seed=3, shuffle=True, block_pieces=8)
    row: list[int] = []
    for epoch in range(epochs):
        if len(row) > sequences * seq_len:
            break
        for position in range(stream, permutation.total, num_streams):
            row += corpus.tokens[permutation.piece(epoch, position)] or []
    result = []
    for begin in range(0, sequences * seq_len, seq_len):
        part = row[begin : begin + seq_len + 1]
        if len(part) < 2:
            part = []
        inputs = [*part[:seq_len], *[PAD] * (seq_len - len(part))]
        labels = [*part[1:], *[IGNORE_INDEX] * (seq_len - max(0, len(part) - 1))]
        result.append((inputs, labels))
    return result
