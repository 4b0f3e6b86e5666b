"""Compute the rounds in which owners orthogonalize matrices (Muon, titanlite/optim/owners.py), analytically.

For the rank with coordinate 0 on all axes of its stages, which owns the most expensive matrix of each round, so that
the others wait for it. `deal` gives the same, but lists the parts of all ranks, which takes too long for a search over
layouts of thousands of ranks. tests/unit/planning/test_owners.py compares them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import torch

from titanlite.optim.newton_schulz import flops, temporary_bytes
from titanlite.planning.communication import Traffic
from titanlite.planning.stages import Matrices, Stage
from titanlite.planning.work import Product


@dataclass(frozen=True)
class OwnerRounds:
    """What the rounds of an optimizer step take. products: of the orthogonalizations. traffic: of the exchange.
    temporary_bytes: peak of a round."""

    products: tuple[Product, ...] = ()
    traffic: tuple[Traffic, ...] = ()
    temporary_bytes: int = 0


def owner_rounds(
    stages: Sequence[Stage], shards: int, replicas: int, dtype: torch.dtype, stored: torch.dtype, steps: int
) -> OwnerRounds:
    """The rounds of a rank with these stages.

    shards: ranks of dp_shard x cp x tp. replicas: of dp_replicate. dtype: of the orthogonalization. stored: of the
    parameters. steps: of the orthogonalization.
    """
    matrices = tuple(each for stage in stages for each in stage.matrices)
    wide = torch.promote_types(stored, torch.float32)
    return _rounds(matrices, shards, replicas, dtype, wide, steps) if matrices else OwnerRounds()


@lru_cache(maxsize=1024)  # a search plans the same stages many times
def _rounds(
    matrices: tuple[Matrices, ...], shards: int, replicas: int, dtype: torch.dtype, wide: torch.dtype, steps: int
) -> OwnerRounds:
    counts = torch.tensor([each.count for each in matrices])
    costs = torch.tensor([flops(each.rows, each.columns, steps) for each in matrices]).repeat_interleave(counts)
    order = costs.sort(descending=True, stable=True).indices
    numbers = torch.arange(len(matrices)).repeat_interleave(counts)[order]
    owned = [matrices[number] for number in numbers[:: shards * replicas].tolist()]
    # this rank's part of each matrix: of a stack, it has parts of the first ones
    values = torch.tensor([size for each in matrices for size in (each.part, 0)])
    parts = values.repeat_interleave(torch.tensor([n for each in matrices for n in (each.own, each.count - each.own)]))
    padded = torch.zeros(len(owned) * shards * replicas, dtype=torch.int64)
    padded[: len(order)] = parts[order]
    by_replica: list[list[int]] = padded.view(len(owned), replicas, shards).sum(-1).tolist()
    exchanged = sum(sent for sent, *_ in by_replica) + sum(each.elements * each.copies for each in owned)
    gathered = replicas * sum(map(max, by_replica))
    traffic = (
        Traffic("dp_shard x tp", "all-to-all", 2 * len(owned), exchanged * dtype.itemsize, shards),
        Traffic("dp_replicate", "all-gather", len(owned), gathered * dtype.itemsize, replicas),
    )
    sizes = Counter(tuple(sorted((each.rows, each.columns))) for each in owned)
    return OwnerRounds(
        tuple(chain(*(_products(*of, steps * count) for of, count in sizes.items()))),
        tuple(part for part in traffic if part.ranks > 1),
        max(_peak_bytes(each, own, dtype, wide) for each, own in zip(owned, by_replica, strict=True)),
    )


def _products(small: int, large: int, count: int) -> list[Product]:
    """Of `count` iterations of newton_schulz.orthogonalize."""
    return [
        Product(small, large, small, count),
        Product(small, small, small, count),
        Product(small, small, large, count),
    ]


def _peak_bytes(owned: Matrices, by_replica: Sequence[int], dtype: torch.dtype, wide: torch.dtype) -> int:
    """Peak bytes of Owners.apply in a round. by_replica: elements of this rank's parts of the matrices of each replica.

    This rank's parts exist all the time. The parts that arrived and the result exist besides the full matrix. Then
    the results for all ranks are copied and sent, and come back. Last, replicas gather, and weights are updated.
    """
    size, replicas = dtype.itemsize, len(by_replica)
    sent, returned = by_replica[0], owned.elements * owned.copies
    # its input, its output, and torch's own buffer of the output
    gathered = (2 * replicas + 1) * max(by_replica) if replicas > 1 else 0
    return size * sum(by_replica) + max(
        size * owned.elements + temporary_bytes(owned.rows, owned.columns, dtype),
        size * (3 * owned.elements + 2 * returned + sent),
        size * (3 * owned.elements + returned + sent + gathered) + 3 * owned.part * wide.itemsize,
    )
