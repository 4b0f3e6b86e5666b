"""Initial weights of experts: the numbers that a rank draws for each that it owns."""

from collections.abc import Iterator
from math import prod
from unittest.mock import Mock

import numpy as np

from benchmarks.growth.count import Count
from titanlite.models.init import BLOCK_NUMEL
from titanlite.models.shared_draws import Axis, Boxes, Plan, blocks_of, shared_cuts
from titanlite.parallel.data import sharded_dimension

EXPERTS = {"w1": (256, 2048, 7168), "w2": (256, 7168, 2048), "w3": (256, 2048, 7168)}
"""Of a layer of DeepSeek-V3 671B."""
EP = {4096: 8}
"""Ranks of ep by dp_shard; else 1."""


def of_experts(ranks: int) -> Iterator[Count]:
    """Draws of the experts of a layer on dp_shard ranks, with EP: of the rank that draws most, if each drew its shard
    alone, and in fact."""
    ep = EP.get(ranks, 1)
    owned = alone = together = 0
    for shape in EXPERTS.values():
        regions = regions_of(shape, ep, ranks // ep)
        owned += prod((regions[0, :, 1] - regions[0, :, 0]).tolist())
        alone += drawn_alone(shape, regions)
        together += drawn_together(shape, ep, regions)
    yield Count("weights of experts, alone", ranks, "numbers drawn / owned", alone * BLOCK_NUMEL / owned)
    yield Count("weights of experts", ranks, "numbers drawn / owned", together * BLOCK_NUMEL / owned)


def regions_of(shape: tuple[int, ...], ep: int, shards: int) -> Boxes:
    """The regions of the ranks of expert_shard, of the first rank of ep."""
    sizes = [shape[0] // ep, *shape[1:]]
    dim = sharded_dimension(sizes, shards)
    regions = np.array([[(0, size) for size in sizes]] * shards)
    length = -(-sizes[dim] // shards)
    regions[:, dim, 0] = np.minimum(np.arange(shards) * length, sizes[dim])
    regions[:, dim, 1] = np.minimum(regions[:, dim, 0] + length, sizes[dim])
    return regions


def drawn_together(shape: tuple[int, ...], ep: int, regions: Boxes) -> int:
    """The blocks of the rank of expert_shard that draws most."""
    shards = len(regions)
    cuts = [(0, ep), (sharded_dimension([shape[0] // ep, *shape[1:]], shards), shards)]
    if not shared_cuts(shape, [cut for cut in cuts if cut[1] > 1], BLOCK_NUMEL):
        return drawn_alone(shape, regions)
    plan = Plan(shape, regions[0], [Axis(Mock(), 0, regions)], BLOCK_NUMEL)
    return max(sum(map(len, of_rank)) for of_rank in zip(*plan.dealt(), strict=True))


def drawn_alone(shape: tuple[int, ...], regions: Boxes) -> int:
    """The same, of some ranks, if each draws the blocks of its region."""
    return max(len(blocks_of(regions[rank], shape, BLOCK_NUMEL)) for rank in (0, len(regions) // 2, -1))
