"""Compute the rounds in which owners orthogonalize matrices (Muon, titanlite/optim/owners.py), analytically.

For the rank with coordinate 0 on all axes of its stages, which owns the most expensive matrix of each round, so that
the others wait for it. `deal` gives the same, but lists the parts of all ranks, which takes too long for a search over
layouts of thousands of ranks. tests/unit/planning/test_owner_rounds.py compares them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import torch

from titanlite.optim.muon import temporary_bytes
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
    matrices = tuple(chain(*(stage.matrices for stage in stages)))
    wide = torch.promote_types(stored, torch.float32)
    return _rounds(matrices, shards, replicas, dtype.itemsize, wide.itemsize, steps) if matrices else OwnerRounds()


@lru_cache(maxsize=1024)  # a search plans the same stages many times
def _rounds(
    matrices: tuple[Matrices, ...], shards: int, replicas: int, size: int, wide: int, steps: int
) -> OwnerRounds:
    """size, wide: bytes of an element in the orthogonalization, and in the update of the weights."""
    kinds: list[Matrices] = []  # of each matrix, in the order in which they are dealt out
    parts: list[int] = []  # elements of this rank's part of each
    for each in sorted(matrices, key=lambda each: -each.flops):
        kinds += [each] * (each.parameters * each.count)
        parts += ([each.part] * each.own + [0] * (each.count - each.own)) * each.parameters
    owned = kinds[:: shards * replicas]
    starts = range(0, len(owned) * shards * replicas, shards)
    sums = [sum(parts[start : start + shards]) for start in starts]
    by_replica = [sums[start : start + replicas] for start in range(0, len(sums), replicas)]
    exchanged = sum(sent for sent, *_ in by_replica) + sum(each.elements * each.copies for each in owned)
    traffic = (
        Traffic("dp_shard x tp", "all-to-all", 2 * len(owned), exchanged * size, shards),
        Traffic("dp_replicate", "broadcast", len(sums) - sums.count(0), sum(sums) * size, replicas),
    )
    shapes = Counter((each.small, each.large) for each in owned)
    return OwnerRounds(
        tuple(chain(*(_products(small, large, steps * count) for (small, large), count in shapes.items()))),
        tuple(part for part in traffic if part.ranks > 1),
        max(_peak_bytes(each, own, shards, size, wide) for each, own in zip(owned, by_replica, strict=True)),
    )


def _products(small: int, large: int, count: int) -> list[Product]:
    """Of `count` iterations of newton_schulz.orthogonalize."""
    return [
        Product(small, large, small, count),
        Product(small, small, small, count),
        Product(small, small, large, count),
    ]


def _peak_bytes(owned: Matrices, by_replica: Sequence[int], shards: int, size: int, wide: int) -> int:
    """Peak bytes of Owners.apply in a round, of matrices with elements of `size` bytes.

    by_replica: elements of this rank's parts of the matrices of each replica. wide: bytes per element of the weights'
    update.
    """
    own, returned = by_replica[0], owned.elements * owned.copies
    received = owned.elements if shards > 1 else 0
    return max(
        # the parts are copied for the exchange, arrive, and are put together
        size * (2 * own + received + owned.elements),
        size * own + temporary_bytes(owned.small, owned.large, size),
        # the results for all ranks, copied from the matrix, then for the exchange; those of this rank, copied after it
        size * (own + owned.elements + returned),
        size * (3 * own + 2 * returned),
        # those of another replica, and the update of the weights
        size * (own + max(by_replica)) + 3 * wide * owned.part,
    )
