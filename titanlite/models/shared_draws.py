"""Initial weights that ranks draw together: each block is drawn once among them, and they exchange parts of blocks.

A shard that is cut along another dimension than the first has a few numbers of each of many blocks: 4 rows of each of
256 experts are 7 blocks' worth of numbers in 256 blocks. Its rank would draw all of these. So the ranks of the mesh
axes that cut the tensor deal the blocks of their common region among them. In a round, each rank draws a few
consecutive blocks; then each axis, from the outermost cut to the innermost, exchanges by all-to-all: after the exchange
of an axis, a rank has the numbers that lie in the region of its coordinate on that axis.

The rounds depend on the layout only, so all ranks of a group call the same collectives in the same order.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby, pairwise
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.runtime.torch_internals import cutting_axes, is_dtensor

BLOCKS_AT_ONCE = 4
"""Blocks that each rank draws in a round: 16 MiB. It receives about as much."""

Boxes = npt.NDArray[np.int64]
"""Regions of a tensor: (regions, dimensions, 2), first index and end."""


class Axis(NamedTuple):
    """The ranks of a mesh axis. regions: of each of them, in the order of `group`; rank: this one's place there."""

    group: dist.ProcessGroup
    rank: int
    regions: Boxes


class Part(NamedTuple):
    """A region inside values that lie one after another. first: of the numbers of a box of `shape`, of which the region
    has `slices`."""

    first: int
    shape: tuple[int, ...]
    slices: tuple[slice, ...]

    def of(self, values: Tensor) -> Tensor:
        return values[self.first : self.first + prod(self.shape)].view(self.shape)[self.slices]


class Exchange(NamedTuple):
    """An all-to-all of a round. parts: of the values that this rank has, in the order in which they are sent."""

    group: dist.ProcessGroup
    parts: Sequence[Part]
    sent: list[int]
    received: list[int]


class Round(NamedTuple):
    """blocks: those that this rank draws. shares: the numbers that it has in the end, as parts of what it has received,
    and their places in its shard."""

    blocks: Sequence[int]
    exchanges: Sequence[Exchange]
    shares: Sequence[tuple[Part, tuple[slice, ...]]]


class Plan:
    """How ranks draw tensors of one layout together. shape: of the tensor. own: this rank's region.

    axes: those that exchange, from the outermost cut to the innermost. block_numel: numbers per block.
    """

    def __init__(self, shape: Sequence[int], own: Boxes, axes: Sequence[Axis], block_numel: int) -> None:
        self._shape, self._own, self._axes, self._block = tuple(shape), own, axes, block_numel
        self._ranks = prod(len(axis.regions) for axis in axes)

    @cached_property
    def rounds(self) -> Sequence[Round]:
        return [self._round(dealt) for dealt in self.dealt()]

    def dealt(self) -> Iterator[list[list[int]]]:
        """The blocks that each rank draws, about as many, by round."""
        common = bounds(self._axes[0].regions)
        blocks = blocks_of(common, self._shape, self._block).tolist()
        at_once = BLOCKS_AT_ONCE * self._ranks
        for first in range(0, len(blocks), at_once):
            of_round = blocks[first : first + at_once]
            edges = [len(of_round) * index // self._ranks for index in range(self._ranks + 1)]
            yield [of_round[begin:end] for begin, end in pairwise(edges)]

    def exchange_(self, local: Tensor, drawn: Tensor, plan: Round) -> None:
        """Exchange the blocks that this rank has drawn, and fill its part of `local`. A collective."""
        values = drawn
        for each in plan.exchanges:
            parts = [part.of(values).reshape(-1) for part in each.parts]
            sent = (torch.cat(parts) if parts else values[:0]).to(local.device)
            values = torch.empty(sum(each.received), dtype=torch.float32, device=local.device)
            dist.all_to_all_single(values, sent, each.received, each.sent, group=each.group)
        for part, place in plan.shares:
            local[place].copy_(part.of(values))

    def _round(self, dealt: Sequence[Sequence[int]]) -> Round:
        """The round in which each rank draws the blocks that are dealt to it."""
        coordinate = [axis.rank for axis in self._axes]
        exchanges = []
        held = self._held(0, coordinate, dealt)
        for stage, axis in enumerate(self._axes):
            wanted = [_overlaps(held, region) for region in axis.regions]
            parts = [part for found, parts in wanted for part in parts]
            sent = [_numbers(found) for found, _ in wanted]
            senders = [[*coordinate[:stage], rank, *coordinate[stage + 1 :]] for rank in range(len(axis.regions))]
            own = axis.regions[axis.rank]
            arriving = [_overlaps(self._held(stage, sender, dealt), own)[0] for sender in senders]
            exchanges.append(Exchange(axis.group, parts, sent, [_numbers(found) for found in arriving]))
            held = np.concatenate(arriving)
        _, parts = _overlaps(held, self._own)
        begin = self._own[:, 0]
        places = [tuple(slice(*edge) for edge in (box - begin[:, None]).tolist()) for box in held]
        mine = dealt[self._number(coordinate)]
        return Round(mine, exchanges, list(zip(parts, places, strict=True)))

    def _held(self, stage: int, coordinate: Sequence[int], dealt: Sequence[Sequence[int]]) -> Boxes:
        """The regions whose numbers the rank at `coordinate` has before the exchange of number `stage`, in order."""
        if stage == 0:
            return self._of_blocks(dealt[self._number(coordinate)])
        axis = self._axes[stage - 1]
        senders = ([*coordinate[: stage - 1], rank, *coordinate[stage:]] for rank in range(len(axis.regions)))
        region = axis.regions[coordinate[stage - 1]]
        return np.concatenate([_overlaps(self._held(stage - 1, each, dealt), region)[0] for each in senders])

    def _number(self, coordinate: Sequence[int]) -> int:
        """The number of a rank among those that draw together."""
        number = 0
        for index, axis in zip(coordinate, self._axes, strict=True):
            number = number * len(axis.regions) + index
        return number

    def _of_blocks(self, blocks: Sequence[int]) -> Boxes:
        """The regions that blocks consist of, in the order of their numbers."""
        found = []
        for _, run in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
            first, *rest = (block for _, block in run)
            end = min(((rest or [first])[-1] + 1) * self._block, prod(self._shape))
            found += [*boxes_of_range(first * self._block, end, self._shape)]
        return np.array(found, dtype=np.int64).reshape(-1, len(self._shape), 2)


def axes_to_share(tensor: Tensor, block_numel: int) -> Sequence[int]:
    """The axes of a DTensor's mesh whose ranks draw it together, from the outermost cut to the innermost; () if each
    rank draws its shard alone.

    Alone, if that draws at most twice the numbers of a shard and of a block. Else the fewest innermost axes with which
    it does. The answer depends on the layout only. Simulated ranks have nobody to exchange with.
    """
    if not is_dtensor(tensor):
        return ()
    shape, mesh = tuple(tensor.shape), tensor.device_mesh
    cuts = [(axis, dim) for axis, dim in cutting_axes(tensor) if mesh.size(axis) > 1]
    if not cuts or any(dist.get_backend(mesh.get_group(axis)) == "fake" for axis, _ in cuts):
        return ()
    chosen = shared_cuts(shape, [(dim, mesh.size(axis)) for axis, dim in cuts], block_numel)
    return [axis for axis, _ in cuts[len(cuts) - chosen :]]


def shared_cuts(shape: Sequence[int], cuts: Sequence[tuple[int, int]], block_numel: int) -> int:
    """How many of the innermost cuts are shared: see axes_to_share. cuts: (dimension, ranks), the outermost first."""

    def region(cuts: Sequence[tuple[int, int]]) -> list[int]:
        sizes = list(shape)
        for dim, ranks in cuts:
            sizes[dim] = -(-sizes[dim] // ranks)
        return sizes

    limit = 2 * (prod(region(cuts)) + block_numel)
    for count in range(len(cuts)):
        outer, inner = cuts[: len(cuts) - count], cuts[len(cuts) - count :]
        if numbers_drawn(shape, region(outer), block_numel) <= limit * prod(ranks for _, ranks in inner):
            return count
    return len(cuts)


def numbers_drawn(shape: Sequence[int], region: Sequence[int], block_numel: int) -> int:
    """About how many numbers the blocks of a region of this size have."""
    runs, length, stride = 1, 1, 1  # runs of `length` numbers, whose blocks have no gaps
    for size, part in zip(reversed(shape), reversed(region), strict=True):
        if runs == 1 and stride <= length + block_numel:
            length += max(0, part - 1) * stride
        else:
            runs *= part
        stride *= size
    return min(stride, runs * (length + block_numel))


def gathered_axes(tensor: Tensor, axes: Sequence[int], own: Boxes, device: torch.device) -> list[Axis]:
    """The axes with the regions of their ranks. A collective of each axis, the innermost first."""
    assert is_dtensor(tensor)
    found: list[Axis] = []
    region = own
    for axis in reversed(axes):
        group = tensor.device_mesh.get_group(axis)
        sent = torch.from_numpy(region.copy()).to(device)
        received = [torch.empty_like(sent) for _ in range(group.size())]
        dist.all_gather(received, sent, group=group)
        regions = torch.stack(received).cpu().numpy()
        found.insert(0, Axis(group, dist.get_rank(group), regions))
        region = bounds(regions)
        missing = _numbers(region[None]) - _numbers(regions)
        assert not missing, f"the shards of the ranks of axis {axis} do not fill a box: {missing} numbers are left"
    return found


def bounds(regions: Boxes) -> Boxes:
    """The smallest region that contains all of them, (dimensions, 2). Empty ones have no place."""
    full = regions[(regions[:, :, 1] > regions[:, :, 0]).all(axis=1)]
    if not len(full):
        return np.zeros_like(regions[0])
    return np.stack([full[:, :, 0].min(axis=0), full[:, :, 1].max(axis=0)], axis=1)


def blocks_of(region: Boxes, shape: Sequence[int], block_numel: int) -> npt.NDArray[np.int64]:
    """The blocks of the flattened tensor that have numbers of a region."""
    if not _numbers(region[None]):
        return np.zeros(0, dtype=np.int64)
    starts, run, stride = np.zeros(1, dtype=np.int64), 1, 1
    for size, (begin, end) in zip(reversed(shape), reversed(region.tolist()), strict=True):
        if run == stride:  # the inner dimensions are complete
            starts, run = starts + begin * stride, (end - begin) * stride
        else:
            starts = (np.arange(begin, end)[:, None] * stride + starts).reshape(-1)
        stride *= size
    changes = np.zeros(-(-stride // block_numel) + 1, dtype=np.int64)
    np.add.at(changes, starts // block_numel, 1)
    np.add.at(changes, (starts + run - 1) // block_numel + 1, -1)
    return np.flatnonzero(np.cumsum(changes[:-1]))


def boxes_of_range(first: int, end: int, shape: Sequence[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """The regions that the numbers [first, end) of a flattened tensor fill, in their order."""
    if not shape:
        yield ()
        return
    size = prod(shape[1:])
    (row, begin), (last, rest) = divmod(first, size), divmod(end, size)
    if row == last:
        yield from (((row, row + 1), *inner) for inner in boxes_of_range(begin, rest, shape[1:]))
        return
    if begin:
        yield from (((row, row + 1), *inner) for inner in boxes_of_range(begin, size, shape[1:]))
        row += 1
    if row < last:
        yield ((row, last), *((0, each) for each in shape[1:]))
    if rest:
        yield from (((last, last + 1), *inner) for inner in boxes_of_range(0, rest, shape[1:]))


def _overlaps(held: Boxes, region: Boxes) -> tuple[Boxes, list[Part]]:
    """What lies in `region`, of values of the boxes `held` one after another: (boxes, their parts of the values)."""
    begin, end = np.maximum(held[:, :, 0], region[:, 0]), np.minimum(held[:, :, 1], region[:, 1])
    chosen = np.flatnonzero((end > begin).all(axis=1))
    if not len(chosen):
        return held[:0], []
    sizes = held[:, :, 1] - held[:, :, 0]
    firsts = np.cumsum(sizes.prod(axis=1)) - sizes.prod(axis=1)
    edges = np.stack([begin, end], axis=2)[chosen]
    inside = (edges - held[chosen][:, :, :1]).tolist()
    parts = [
        Part(first, tuple(shape), tuple(slice(*edge) for edge in box))
        for first, shape, box in zip(firsts[chosen].tolist(), sizes[chosen].tolist(), inside, strict=True)
    ]
    return edges, parts


def _numbers(boxes: Boxes) -> int:
    """Numbers of all boxes together."""
    sizes = np.maximum(boxes[:, :, 1] - boxes[:, :, 0], 0)
    return int(sizes.prod(axis=1).sum())
