"""The order of shuffled windows of token files, from data.stream_version 4 on.

Each epoch permutes blocks of consecutive windows and cuts their concatenation into one segment for each stream. A
stream reads its segment group by group of a few blocks, whose windows it mixes. So the processes that read a stream
need few parts of the files at a time, and each part is needed by one stream (at the ends of a segment, by two).

The streams of a run are on all its nodes, and a step has sequences of all streams: it mixes windows of as many blocks
as there are streams. The order depends on the number of windows and their length, the seeds and the number of streams;
not on the mesh.
"""

from math import isqrt

import numpy as np
import numpy.typing as npt

from titanlite.data.order import GOLDEN_RATIO, RUN_PIECES, mix, random_words, shuffled

BLOCK_TOKENS = 5 * 2**18
"""Most tokens of a block: 2.5 MiB of ids of 16 bits, for which a store is asked in one request, and in another one
whether the object is unchanged."""

MIN_BLOCKS, MIN_STREAM_BLOCKS = 2**11, 2**3
"""Fewest blocks of an epoch, and of each stream on average; blocks of small sources are smaller, down to a window."""

OPEN_BLOCKS, FEWEST_OPEN, MOST_OPEN = 2**11, 2, 2**5
"""Blocks that are mixed at a time: of all streams together, and the bounds of those of each."""

FETCHED_TOKENS = 2**17
"""Fewest tokens that a store is asked for at once: a request for less takes about as long."""

SORTED = 2**12
"""Largest permutation that is sorted: few rounds do not mix a small one evenly."""

ROUNDS = 8


def scattered(places: npt.NDArray[np.int64], count: int, *seeds: int) -> npt.NDArray[np.int64]:
    """The elements at `places` of a permutation of range(count) that depends on all `seeds`.

    A large one is a Feistel network over two digits, whose results outside of the range go through it again (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002): it needs no memory. In each round, a digit is shifted by an
    output of SplitMix64 that the other one chooses.
    """
    if count <= SORTED:
        return shuffled(count, *seeds)[places]
    radix = isqrt(count - 1) + 1
    low_size, high_size = np.uint64(radix), np.uint64(-(-count // radix))
    keys = random_words(ROUNDS, *seeds)
    numbers = places.astype(np.uint64)
    outside = np.ones(len(numbers), np.bool_)
    while outside.any():
        high, low = np.divmod(numbers[outside], low_size)
        for even, odd in keys.reshape(-1, 2):
            low = (low + mix(even + high * GOLDEN_RATIO) % low_size) % low_size
            high = (high + mix(odd + low * GOLDEN_RATIO) % high_size) % high_size
        numbers[outside] = high * low_size + low
        outside = numbers >= count
    return numbers.astype(np.int64)


def fetched_windows(block: int, seq_len: int) -> int:
    """Windows of `seq_len` tokens that a store is asked for at once: a multiple of those of a block."""
    return block * -(-FETCHED_TOKENS // (block * seq_len))


class Segments:
    """An Order of `count` windows of `seq_len` tokens for `num_streams` streams. block: windows of a block."""

    def __init__(self, count: int, seeds: tuple[int, ...], *, num_streams: int, seq_len: int) -> None:
        self.count = count
        self._seeds = seeds
        self._num_streams = num_streams
        most_blocks = max(MIN_BLOCKS, MIN_STREAM_BLOCKS * num_streams)
        self.block = max(1, min(BLOCK_TOKENS // seq_len, count // most_blocks))
        self.open_windows = self.block * max(FEWEST_OPEN, min(MOST_OPEN, OPEN_BLOCKS // num_streams))
        """Windows that a stream mixes at a time: between 2/3 and 3/2 of these, or its segment if that is shorter."""

    def pieces(self, epoch: int, position: int, stride: int) -> npt.NDArray[np.int64]:
        assert stride == self._num_streams, "the segments are those of the streams"
        stream = (epoch * self.count + position) % stride
        begin, size = self._segment(epoch, stream)
        number = position // stride
        groups = max(1, (size + self.open_windows // 2) // self.open_windows)
        group = ((number + 1) * groups - 1) // size
        first, end = group * size // groups, (group + 1) * size // groups
        numbers = np.arange(number, min(end, number + RUN_PIECES)) - first
        mixed = scattered(numbers, end - first, *self._seeds, epoch, stream, group)
        return self._windows(epoch, begin + first + mixed)

    def _segment(self, epoch: int, stream: int) -> tuple[int, int]:
        """The begin and size of a stream's segment of an epoch: as many windows as it has positions there."""
        each, more = divmod(self.count, self._num_streams)
        first = epoch * self.count % self._num_streams  # this stream, and the `more` - 1 after it, have one more
        before = min(max(stream - first, 0), more) + min(stream, max(first + more - self._num_streams, 0))
        return stream * each + before, each + ((stream - first) % self._num_streams < more)

    def _windows(self, epoch: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The windows at `places` of the concatenation of the permuted blocks."""
        blocks, rest = divmod(self.count, self.block)  # the last block has the rest, and a place of its own
        begin = int(random_words(1, *self._seeds, epoch, blocks)[0]) % (blocks + 1) * self.block
        in_rest = (places >= begin) & (places < begin + rest)
        others = np.where(in_rest, 0, places - rest * (places >= begin + rest))
        number, offset = np.divmod(others, self.block)
        windows = scattered(number, blocks, *self._seeds, epoch) * self.block + offset
        return np.where(in_rest, blocks * self.block + places - begin, windows)
