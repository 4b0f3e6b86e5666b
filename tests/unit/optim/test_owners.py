"""Matrices on owners: orthogonalized as in one process, on every division of their parts, and for few bytes."""

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tests.pool import run_ranks
from titanlite.optim.newton_schulz import flops, orthogonalize
from titanlite.optim.owners import Owners, part_of
from titanlite.parallel.mesh import Sharing

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SHAPES = ((12, 8), (5, 16), (8, 8), (3, 7), (4, 6, 10), (2, 9, 4))
PLACEMENTS: dict[str, tuple[tuple[int, ...], Sequence[Sequence[Placement]]]] = {
    "shard 4": ((1, 4, 1), [[Replicate(), Shard(0), Replicate()]] * 6),
    "tp 2": ((1, 2, 2), [[Replicate(), Shard(0), Shard(each % 2 + (each > 3))] for each in range(6)]),
    "replicas": ((2, 2, 1), [[Replicate(), Shard(0), Replicate()]] * 6),
    "replicas only": ((4, 1, 1), [[Replicate(), Shard(0), Replicate()]] * 6),
    "copies over tp": ((2, 1, 2), [[Replicate(), Shard(0), Replicate()]] * 6),
}


def function(matrix: Tensor) -> Tensor:
    return orthogonalize(matrix, 5, COEFFICIENTS)


def full(shape: tuple[int, ...], number: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def applied(sizes: tuple[int, ...], placements: Sequence[Sequence[Placement]]) -> tuple[float, list[int]]:
    """(largest relative error, numbers of matrices by owner)."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards", "tp"))
    parameters, parts, expected = [], [], []
    for number, (shape, places) in enumerate(zip(SHAPES, placements, strict=True)):
        whole = full(shape, number)
        meta = DTensor.from_local(
            torch.empty(1), mesh, places, shape=whole.shape, stride=whole.stride(), run_check=False
        )
        own = part_of(meta, dist.get_rank())
        parameters.append(meta)
        parts.append(whole[own].clone())
        result = function(whole) if whole.dim() == 2 else torch.stack([function(each) for each in whole])
        expected.append(result[own])
    sharing = Sharing(mesh["shards", "tp"]._flatten("all").get_group(), mesh["replicas"].get_group())
    owners = Owners(parameters, sharing, lambda rows, columns: flops(rows, columns, 5))
    found = owners.apply(parts, function)
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True) if b.numel()]
    assert [each.shape for each in found] == [each.shape for each in parts]
    counts = [0] * dist.get_world_size()
    for matrix in itertools.chain(*owners.rounds):
        counts[matrix.replica * owners.size + matrix.owner] += 1
    return max(errors, default=0.0), counts


@pytest.mark.parametrize("name", PLACEMENTS)
def test_results_are_those_of_one_process(name: str) -> None:
    for error, counts in run_ranks(applied, 4, *PLACEMENTS[name]):
        assert error < 1e-13
        assert sum(counts) == 10
        assert max(counts) - min(counts) <= 1


def test_one_process_needs_no_group() -> None:
    parts = [full(shape, number) for number, shape in enumerate(SHAPES)]
    found = Owners(parts, Sharing(), lambda rows, columns: rows * columns).apply(parts, function)
    torch.testing.assert_close(found[0], function(parts[0]), rtol=0, atol=0)
    torch.testing.assert_close(found[4][2], function(parts[4][2]), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (8, 8)])
def test_singular_values_end_near_1(shape: tuple[int, int]) -> None:
    left, values, right = torch.linalg.svd(function(full(shape, 0)), full_matrices=False)
    assert values.min() > 0.6 and values.max() < 1.25
    reference = torch.linalg.svd(full(shape, 0), full_matrices=False)
    torch.testing.assert_close(left @ right, reference.U @ reference.Vh, rtol=0, atol=1e-9)
    assert not function(torch.zeros(shape)).any()
