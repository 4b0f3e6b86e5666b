"""The order of the pieces: a seeded permutation per epoch, in two levels, the same for ever and on every machine.

Order of the keys: SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014;
constants from Vigna's public-domain splitmix64.c), sorted. It does not depend on numpy's own generators, whose
streams may change between versions.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

STREAM_VERSION = 1
"""Version of the order of pieces and of their packing. A change of either changes every run and has to change this."""

BLOCK_PIECES = 2**16
"""About as many pieces are permuted among each other: enough to mix well, few enough to be read in long stretches."""

KEPT_BLOCKS = 16
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
_WORD = 2**64
_GOLDEN = 0x9E3779B97F4A7C15


def mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output function of SplitMix64, element by element."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def shuffled(count: int, *seeds: int) -> npt.NDArray[np.int64]:
    """A permutation of range(count) that depends on all `seeds`: the order of a SplitMix64 sequence's outputs."""
    state = np.zeros(1, np.uint64)
    for seed in seeds:
        state = mix(state + np.uint64((seed + 1) * _GOLDEN % _WORD))
    keys = mix(state + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN))
    return np.argsort(keys, kind="stable").astype(np.int64)


class Permutation:
    """Position in an epoch -> piece, over sources of `counts` pieces, numbered one source after the other.

    Block b takes the b-th share of every source, so that the sources are mixed evenly however unlike their sizes are.
    Blocks are permuted, and pieces inside each. Without shuffle, position and piece are the same number.
    """

    def __init__(self, counts: Sequence[int], *, seed: int, shuffle: bool, block_pieces: int = BLOCK_PIECES) -> None:
        self.total = sum(counts)
        self._seed = seed
        self._shuffle = shuffle
        num_blocks = max(1, -(-self.total // block_pieces))
        shares = np.arange(num_blocks + 1, dtype=np.int64)[:, None] * np.array(counts, np.int64)[None, :] // num_blocks
        first_piece = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
        self._bounds = shares + first_piece
        self._sizes = (shares[1:] - shares[:-1]).sum(axis=1)
        self._epochs: OrderedDict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = OrderedDict()
        self._blocks: OrderedDict[tuple[int, int], npt.NDArray[np.int64]] = OrderedDict()

    def piece(self, epoch: int, position: int) -> int:
        """The piece at `position` < total of an epoch."""
        if not self._shuffle:
            return position
        order, starts = self._block_order(epoch)
        place = int(np.searchsorted(starts, position, side="right")) - 1
        return int(self._block(epoch, int(order[place]))[position - starts[place]])

    def _block_order(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The blocks in their order, and the position at which each starts."""
        if epoch not in self._epochs:
            order = shuffled(len(self._sizes), self._seed, epoch)
            starts = np.concatenate([[0], np.cumsum(self._sizes[order])[:-1]]).astype(np.int64)
            self._epochs[epoch] = (order, starts)
        return _recent(self._epochs, epoch)

    def _block(self, epoch: int, block: int) -> npt.NDArray[np.int64]:
        """The pieces of one block in their order."""
        key = (epoch, block)
        if key not in self._blocks:
            begins, ends = self._bounds[block], self._bounds[block + 1]
            pieces = np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])
            self._blocks[key] = pieces[shuffled(len(pieces), self._seed, epoch, block)]
        return _recent(self._blocks, key)


def _recent(kept: OrderedDict[K, V], key: K) -> V:
    kept.move_to_end(key)
    while len(kept) > KEPT_BLOCKS:
        kept.popitem(last=False)
    return kept[key]
