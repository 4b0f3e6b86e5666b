"""The order of the pieces: a seeded permutation per epoch, in two levels, the same for ever and on every machine.

Order of the keys: SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014;
constants from Vigna's public-domain splitmix64.c), sorted. It does not depend on numpy's own generators, whose
streams may change between versions.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from titanlite.data.recent import Recent

STREAM_VERSION = 1
"""Version of the order of pieces and of their packing. A change of either changes every run and has to change this."""

BLOCK_PIECES = 2**16
"""About as many pieces are permuted among each other: enough to mix well, few enough to be read in long stretches."""

KEPT = 16
"""Orders of so many blocks and epochs stay in memory: streams are not all at the same place."""

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
        self._orders: Recent[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = Recent(KEPT, lambda _: 1)
        self._blocks: Recent[tuple[int, int], npt.NDArray[np.int64]] = Recent(KEPT, lambda _: 1)

    def piece(self, epoch: int, position: int) -> int:
        """The piece at `position` < total of an epoch."""
        if not self._shuffle:
            return position
        order, starts = self._orders.get(epoch, lambda: self._block_order(epoch))
        place = int(np.searchsorted(starts, position, side="right")) - 1
        block = int(order[place])
        pieces = self._blocks.get((epoch, block), lambda: self._block(epoch, block))
        return int(pieces[position - starts[place]])

    def _block_order(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The blocks in their order, and the position at which each starts."""
        order = shuffled(len(self._sizes), self._seed, epoch)
        starts = np.concatenate([[0], np.cumsum(self._sizes[order])[:-1]]).astype(np.int64)
        return order, starts

    def _block(self, epoch: int, block: int) -> npt.NDArray[np.int64]:
        """The pieces of one block in their order."""
        begins, ends = self._bounds[block], self._bounds[block + 1]
        pieces = np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])
        return pieces[shuffled(len(pieces), self._seed, epoch, block)]
