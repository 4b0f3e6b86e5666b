"""The order of pieces and sources, the same on every machine and in every version with the same STREAM_VERSION.

Pieces: a seeded permutation per epoch, in two levels; of windows of token files, see titanlite.data.segments. Sources:
a sequence that follows the weights closely from the first sequences.

A permutation sorts keys of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA
2014; constants from Vigna's public-domain splitmix64.c). It does not use numpy's generators, whose streams may change
between versions.
"""

import threading
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from titanlite.data.sources.pieces import Corpus, Place, TokenPiece
from titanlite.runtime.cache import Recent

STREAM_VERSION = 4
"""Version of the order of sources and pieces, of their packing and of their tokens. Increase it on any change, and keep
the earlier version for the runs that began with it: data.stream_version."""

BLOCK_PIECES = 2**16
"""Approximate pieces per block of the permutation: enough to mix well, few enough for long sequential reads."""

TABLE_BYTES = 2**25
"""Block orders and epoch orders in the memory of a process, of all sources and streams together: 256 full blocks."""

RUN_PIECES = 256
"""Pieces that a stream looks up at once. It keeps their numbers, so that streams in other blocks than most do not sort
a block again for each piece."""

PIECES_AHEAD = 8
"""How far ahead of a stream a store is asked for a window."""

READ_AHEAD_PIECES = 64
"""Maximum pieces of one stream that are tokenized in one batch."""

MIN_PATIENCE = 1000
"""Minimum patience, for small sources. Larger ones have a patience of two epochs: see StreamPieces.patience."""

_WORD = 2**64
GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
_SQRT_TWO = 0x6A09E667F3BCC909


def mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output function of SplitMix64, element by element."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def random_words(count: int, *seeds: int) -> npt.NDArray[np.uint64]:
    """The first `count` outputs of a SplitMix64 sequence that depends on all `seeds`."""
    state = np.zeros(1, np.uint64)
    for seed in seeds:
        state = mix(state + np.uint64((seed + 1) * int(GOLDEN_RATIO) % _WORD))
    return mix(state + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN_RATIO)


def shuffled(count: int, *seeds: int) -> npt.NDArray[np.int64]:
    """A permutation of range(count) that depends on all `seeds`: the order of a SplitMix64 sequence's outputs."""
    return np.argsort(random_words(count, *seeds), kind="stable").astype(np.int64)


class _Tables:
    """Arrays that are computed again when they are needed and no longer in memory. Threads of a process share it."""

    def __init__(self) -> None:
        self._recent: Recent[Hashable, tuple[npt.NDArray[np.integer], ...]] = Recent(
            TABLE_BYTES, lambda table: sum(each.nbytes for each in table)
        )
        self._lock = threading.Lock()

    def get(
        self, key: Hashable, make: Callable[[], tuple[npt.NDArray[np.integer], ...]]
    ) -> tuple[npt.NDArray[np.integer], ...]:
        with self._lock:
            return self._recent.get(key, make)


_tables = _Tables()


class Order(Protocol):
    """A permutation of `count` pieces for each epoch."""

    count: int

    def pieces(self, epoch: int, position: int, stride: int) -> npt.NDArray[np.int64]:
        """The pieces at the positions `position` < count, `position` + stride, … of an epoch: at least the first one,
        at most RUN_PIECES. stride: the number of streams."""
        ...


class Permutation:
    """An Order that permutes blocks of consecutive pieces, and the pieces inside each block, by all `seeds`. Without
    seeds, the piece is the position.
    """

    def __init__(self, count: int, seeds: tuple[int, ...], *, block_pieces: int = BLOCK_PIECES) -> None:
        self.count = count
        self._seeds = seeds
        num_blocks = -(-count // block_pieces)
        self._bounds = np.arange(num_blocks + 1, dtype=np.int64) * count // num_blocks
        self._key = (count, seeds, block_pieces)

    def pieces(self, epoch: int, position: int, stride: int) -> npt.NDArray[np.int64]:
        if not self._seeds:
            return np.arange(position, min(self.count, position + stride * RUN_PIECES), stride)
        order, starts = _tables.get((self._key, epoch), lambda: self._block_order(epoch))
        place = int(starts.searchsorted(position, side="right")) - 1
        block = int(order[place])
        (offsets,) = _tables.get((self._key, epoch, block), lambda: (self._offsets(epoch, block),))
        found: npt.NDArray[np.int64] = self._bounds[block] + offsets[position - starts[place] :: stride][:RUN_PIECES]
        return found

    def _block_order(self, epoch: int) -> tuple[npt.NDArray[np.integer], ...]:
        """The order of the blocks, and the position at which each block starts."""
        sizes = np.diff(self._bounds)
        order = shuffled(len(sizes), *self._seeds, epoch)
        starts = np.concatenate([[0], np.cumsum(sizes[order])[:-1]]).astype(np.int64)
        return order.astype(np.int32), starts

    def _offsets(self, epoch: int, block: int) -> npt.NDArray[np.uint16]:
        """The pieces of one block in their order of the epoch, counted from its first one."""
        begin, end = self._bounds[block : block + 2].tolist()
        return shuffled(end - begin, *self._seeds, epoch, block).astype(np.uint16)


class IndexedPieces:
    """StreamPieces of stream s of S, of a source that can be read at any piece: positions s, s + S, s + 2S, … of the
    concatenated orders of all epochs.

    Place.position is the position within the epoch. epochs: number of epochs; -1: no limit.
    """

    def __init__(self, corpus: Corpus, order: Order, stream: int, *, num_streams: int, name: str, epochs: int) -> None:
        self.windows = corpus.windows
        self.name = name
        self.patience = max(MIN_PATIENCE, 2 * corpus.count) * max(1, epochs)
        self._corpus = corpus
        self._order = order
        self._stream = stream
        self._num_streams = num_streams
        self._epochs = epochs
        self._fetched: dict[Place, TokenPiece | Exception] = {}
        self._numbers: dict[Place, int] = {}  # of the pieces that were fetched last
        self._run = (Place(-1, 0), np.empty(0, np.int64))

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
        if place in self._numbers:
            return self._numbers[place]
        index = self._index(place)
        return int(self._run[1][index])

    def _index(self, place: Place) -> int:
        """The index of a place in the run of those that were looked up last; else looks up those from `place` on."""
        first, numbers = self._run
        index, rest = divmod(place.position - first.position, self._num_streams)
        if place.epoch == first.epoch and not rest and 0 <= index < len(numbers):
            return index
        self._run = (place, self._order.pieces(*place, self._num_streams))
        return 0

    def fetch(self, place: Place, num_tokens: int) -> TokenPiece | Exception:
        if place not in self._fetched:  # of text, read the piece and the next few, and tokenize them in one batch
            if self.windows:
                index = self._index(place)
                soon = self._run[1][index and index + PIECES_AHEAD : index + PIECES_AHEAD + 1]
                self._corpus.prepare(soon.tolist())
            places = [place]
            pieces = self._corpus.ahead(self._following(places), num_tokens)
            self._numbers = dict(zip(places, pieces, strict=True))
            self._fetched = dict(zip(places, self._corpus.fetch(pieces), strict=True))
        return self._fetched.pop(place)

    def _following(self, places: list[Place]) -> Iterator[int]:
        """Yield the piece number at places[0] and the following ones; append the place of each to `places`."""
        yield self.number(places[0])
        while len(places) < READ_AHEAD_PIECES and not self.has_ended(place := self.after(places[-1])):
            places.append(place)
            yield self.number(place)

    def _place(self, number: int) -> Place:
        """Place of position `number` of the concatenated orders of all epochs."""
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
        return bisect_right(self._ends, (self._start + count * int(GOLDEN_RATIO) + stream * _SQRT_TWO) % _WORD)
