"""The order of pieces and sources, the same on every machine and in every version with the same STREAM_VERSION.

Pieces: a seeded permutation per epoch, in two levels. Sources: a sequence that follows the weights closely from the
first sequences.

A permutation sorts keys of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA
2014; constants from Vigna's public-domain splitmix64.c). It does not use numpy's generators, whose streams may change
between versions.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from titanlite.data.sources.pieces import Corpus, Place, TokenPiece
from titanlite.runtime.cache import Recent

STREAM_VERSION = 4
"""Version of the order of sources and pieces, of their packing and of their tokens. Increase it on any change, and keep
the earlier version for the runs that began with it: data.stream_version."""

BLOCK_PIECES = 2**16
"""Approximate pieces per block of the permutation: enough to mix well, few enough for long sequential reads."""

CACHED_ORDERS = 16
"""Number of block orders and epoch orders in memory: streams differ in block and epoch."""

READ_AHEAD_PIECES = 64
"""Maximum pieces of one stream that are tokenized in one batch."""

MIN_PATIENCE = 1000
"""Minimum patience, for small sources. Larger ones have a patience of two epochs: see StreamPieces.patience."""

_WORD = 2**64
_GOLDEN_RATIO = 0x9E3779B97F4A7C15
_SQRT_TWO = 0x6A09E667F3BCC909


def mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output function of SplitMix64, element by element."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def shuffled(count: int, *seeds: int) -> npt.NDArray[np.int64]:
    """A permutation of range(count) that depends on all `seeds`: the order of a SplitMix64 sequence's outputs."""
    state = np.zeros(1, np.uint64)
    for seed in seeds:
        state = mix(state + np.uint64((seed + 1) * _GOLDEN_RATIO % _WORD))
    keys = mix(state + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN_RATIO))
    return np.argsort(keys, kind="stable").astype(np.int64)


class Permutation:
    """Maps a position in an epoch to one of `count` pieces.

    Permutes blocks of consecutive pieces, and the pieces inside each block, by all `seeds`. Without seeds, the piece is
    the position.
    """

    def __init__(self, count: int, seeds: tuple[int, ...], *, block_pieces: int = BLOCK_PIECES) -> None:
        self.count = count
        self._seeds = seeds
        num_blocks = -(-count // block_pieces)
        self._bounds = np.arange(num_blocks + 1, dtype=np.int64) * count // num_blocks
        self._orders: Recent[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = Recent(
            CACHED_ORDERS, lambda _: 1
        )
        self._blocks: Recent[tuple[int, int], npt.NDArray[np.int64]] = Recent(CACHED_ORDERS, lambda _: 1)

    def piece(self, epoch: int, position: int) -> int:
        """The piece at `position` < count of an epoch."""
        if not self._seeds:
            return position
        order, starts = self._orders.get(epoch, lambda: self._block_order(epoch))
        place = int(starts.searchsorted(position, side="right")) - 1
        block = int(order[place])
        pieces = self._blocks.get((epoch, block), lambda: self._block(epoch, block))
        return int(pieces[position - starts[place]])

    def _block_order(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The order of the blocks, and the position at which each block starts."""
        sizes = np.diff(self._bounds)
        order = shuffled(len(sizes), *self._seeds, epoch)
        starts = np.concatenate([[0], np.cumsum(sizes[order])[:-1]]).astype(np.int64)
        return order, starts

    def _block(self, epoch: int, block: int) -> npt.NDArray[np.int64]:
        """The pieces of one block in their order of the epoch."""
        begin, end = self._bounds[block : block + 2].tolist()
        pieces: npt.NDArray[np.int64] = begin + shuffled(end - begin, *self._seeds, epoch, block)
        return pieces


class IndexedPieces:
    """StreamPieces of stream s of S, of a source that can be read at any piece: positions s, s + S, s + 2S, … of the
    concatenated permutations of all epochs.

    Place.position is the position within the epoch. epochs: number of epochs; -1: no limit.
    """

    def __init__(
        self, corpus: Corpus, permutation: Permutation, stream: int, *, num_streams: int, name: str, epochs: int
    ) -> None:
        self.windows = corpus.windows
        self.name = name
        self.patience = max(MIN_PATIENCE, 2 * corpus.count) * max(1, epochs)
        self._corpus = corpus
        self._permutation = permutation
        self._stream = stream
        self._num_streams = num_streams
        self._epochs = epochs
        self._fetched: dict[Place, TokenPiece | Exception] = {}
        self._looked_up = (Place(-1, -1), -1)

    def first(self) -> Place:
        return self._place(self._stream)

    def after(self, place: Place) -> Place:
        return self._place(place.epoch * self._corpus.count + place.position + self._num_streams)

    def has_ended(self, place: Place) -> bool:
        return place.epoch >= self._epochs > 0

    def has(self, place: Place) -> bool:
        return place.position < self._corpus.count

    def epochs(self, place: Place) -> float:
        passed = (place.epoch * self._corpus.count + place.position - self._stream) // self._num_streams
        return passed / self._corpus.count

    def number(self, place: Place) -> int:
        if self._looked_up[0] != place:  # called twice for each window
            self._looked_up = (place, self._permutation.piece(*place))
        return self._looked_up[1]

    def fetch(self, place: Place, num_tokens: int) -> TokenPiece | Exception:
        if place not in self._fetched:  # of text, read the piece and the next few, and tokenize them in one batch
            places = [place]
            pieces = self._corpus.ahead(self._numbers(places), num_tokens)
            self._fetched = dict(zip(places, self._corpus.fetch(pieces), strict=True))
        return self._fetched.pop(place)

    def _numbers(self, places: list[Place]) -> Iterator[int]:
        """Yield the piece number at places[0] and the following ones; append the place of each to `places`."""
        yield self.number(places[0])
        while len(places) < READ_AHEAD_PIECES and not self.has_ended(place := self.after(places[-1])):
            places.append(place)
            yield self.number(place)

    def _place(self, number: int) -> Place:
        """Place of position `number` of the concatenated permutations of all epochs."""
        return Place(*divmod(number, self._corpus.count))


class Mixture:
    """The source of each sequence, by the weights of the sources.

    Each source has an interval of [0, 1), as long as its share of the sequences. Sequence `count` of a stream takes the
    source whose interval contains the point hash(seed) + count x golden ratio + stream x sqrt(2), modulo 1. Along a
    stream and across the streams of a step, these points are an additive recurrence with an irrational step, which is
    equidistributed (Weyl 1916). Each source therefore stays within a few sequences of its share; random draws would
    deviate by the square root of the number of sequences. All arithmetic is on integers modulo 2^64, the same on every
    machine.
    """

    def __init__(self, weights: Sequence[float], *, seed: int) -> None:
        """weights: positive, one for each source; only their ratios count."""
        exact = [Fraction(weight) for weight in weights]
        total = sum(exact)
        self.shares = tuple(float(weight / total) for weight in exact)
        """Share of each source; the sum is 1."""
        self._ends = [int(end / total * _WORD) for end in accumulate(exact)][:-1]
        self._start = int(mix(np.array([seed], np.uint64))[0])

    def source(self, stream: int, count: int) -> int:
        """Index of the source of sequence `count` (from 0) of the stream."""
        if not self._ends:
            return 0
        return bisect_right(self._ends, (self._start + count * _GOLDEN_RATIO + stream * _SQRT_TWO) % _WORD)
