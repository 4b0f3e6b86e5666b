"""Matrices on owners: orthogonalized as in one process, on every division of their parts, and for few bytes."""

import itertools
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.pool import run_ranks
from titanlite.optim.muon import flops, orthogonalize
from titanlite.optim.owners import Matrix, Owners, deal, divisions_of
from titanlite.parallel.mesh import ShardGroups
from titanlite.runtime.torch_internals import local_part

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SHAPES = ((12, 8), (5, 16), (8, 8), (3, 7), (4, 6, 10), (2, 9, 4))
MATRICES = 10

# fully_shard divides what tp has left of a dimension
BOTH = (Replicate(), _StridedShard(0, split_factor=2), Shard(0))
OTHER = (Replicate(), Shard(0), Shard(1))
PLACEMENTS: dict[str, tuple[tuple[int, ...], Sequence[Sequence[Placement]]]] = {
    "shard 4": ((1, 4, 1), [[Replicate(), Shard(0), Replicate()]] * 6),
    "tp 2": ((1, 2, 2), [BOTH, OTHER, BOTH, OTHER, OTHER, OTHER]),
    "replicas": ((2, 2, 1), [[Replicate(), Shard(0), Replicate()]] * 6),
    "replicas only": ((4, 1, 1), [[Replicate(), Shard(0), Replicate()]] * 6),
    "copies over tp": ((2, 1, 2), [[Replicate(), Shard(0), Replicate()]] * 6),
}


def function(matrix: Tensor) -> Tensor:
    return orthogonalize(matrix, [COEFFICIENTS] * 5)


def full(shape: tuple[int, ...], number: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def cost(rows: int, columns: int) -> float:
    return flops(rows, columns, 5)


def of_each_matrix(tensor: Tensor) -> Tensor:
    return function(tensor) if tensor.dim() == 2 else torch.stack([function(each) for each in tensor])


def apply(owners: Owners, parts: Sequence[Tensor]) -> list[Tensor]:
    """This rank's parts of the results."""
    found = [torch.full_like(part, torch.nan) for part in parts]

    def use(matrix: Matrix, result: Tensor) -> None:
        matrix.part_of(found[matrix.parameter]).copy_(result)

    owners.apply(lambda matrix: matrix.part_of(parts[matrix.parameter]), function, use, torch.float64)
    return found


def applied() -> list[tuple[float, list[int]]]:
    """Of each placement: (largest relative error, numbers of matrices by owner)."""
    return [apply_placed(*each) for each in PLACEMENTS.values()]


def apply_placed(sizes: tuple[int, ...], placements: Sequence[Sequence[Placement]]) -> tuple[float, list[int]]:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards", "tp"))
    tensors = [full(shape, number) for number, shape in enumerate(SHAPES)]
    parameters = [distribute_tensor(each, mesh, place) for each, place in zip(tensors, placements, strict=True)]
    expected = [distribute_tensor(of_each_matrix(each), mesh, p) for each, p in zip(tensors, placements, strict=True)]
    shard_groups = ShardGroups(mesh["shards", "tp"]._flatten("all").get_group(), mesh["replicas"].get_group())
    owners = Owners(parameters, shard_groups, cost)
    found = apply(owners, [local_part(parameter) for parameter in parameters])
    errors = [
        ((a - local_part(b)).norm() / local_part(b).norm()).item()
        for a, b in zip(found, expected, strict=True)
        if a.numel()
    ]
    counts = [0] * dist.get_world_size()
    for matrix in itertools.chain(*owners.rounds):
        counts[matrix.replica * owners.size + matrix.owner] += 1
    return max(errors, default=0.0), counts


def test_results_are_those_of_one_process() -> None:
    for ranks in run_ranks(applied, 4):
        for name, (error, counts) in zip(PLACEMENTS, ranks, strict=True):
            assert error < 1e-13, name
            assert sum(counts) == MATRICES, name
            assert max(counts) - min(counts) <= 1, name


def test_one_process_needs_no_group() -> None:
    parts = [full(shape, number) for number, shape in enumerate(SHAPES)]
    for found, part in zip(apply(Owners(parts, ShardGroups(), cost), parts), parts, strict=True):
        assert torch.equal(found, of_each_matrix(part))


def test_matrices_of_a_round_cost_about_the_same() -> None:
    parameters = [torch.empty(size, 8, device="meta") for size in (3, 40, 4, 41, 5, 42)]
    divided = [divisions_of(parameter.shape, [()] * 3) for parameter in parameters]
    rounds = deal(parameters, divided, cost, rank=0, size=3, replicas=1)
    assert [[matrix.shape[0] for matrix in matrices] for matrices in rounds] == [[42, 41, 40], [5, 4, 3]]
    assert [[matrix.owner for matrix in matrices] for matrices in rounds] == [[0, 1, 2]] * 2


def received(size: int, rank: int) -> int:
    """Elements that a rank receives for 16 matrices that are sharded over `size` ranks."""
    parameters = [torch.empty(32, 24, device="meta")] * 16
    divided = [divisions_of(parameter.shape, [[(0, size, each)] for each in range(size)]) for parameter in parameters]
    total = 0
    for matrix in itertools.chain(*deal(parameters, divided, cost, rank=rank, size=size, replicas=1)):
        division = matrix.division
        total += sum(division.size(sender) for sender in division.senders) if matrix.owner == rank else 0
        total += division.size(rank)
    return total


def test_elements_per_rank_fall_with_the_number_of_ranks() -> None:
    for size in (1, 2, 4, 8, 16):
        assert {received(size, rank) for rank in range(size)} == {2 * 16 * 32 * 24 // size}


MESSAGES = (((1, 4, 1), 8), ((2, 2, 1), 3), ((4, 1, 1), 2), ((4, 1, 1), 9))
"""Sizes of a mesh, and a number of matrices."""


def messages() -> list[tuple[int, int, int]]:
    return [count_messages(*each) for each in MESSAGES]


def count_messages(sizes: tuple[int, ...], count: int) -> tuple[int, int, int]:
    """Elements that this rank passes to all-to-alls and to broadcasts, of `count` matrices; elements of its parts."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards", "tp"))
    placements = PLACEMENTS["shard 4"][1][0]
    parameters = [distribute_tensor(full((12, 8), number), mesh, placements) for number in range(count)]
    replicas = mesh["replicas"].get_group() if sizes[0] > 1 else None
    owners = Owners(parameters, ShardGroups(mesh["shards", "tp"]._flatten("all").get_group(), replicas), cost)
    exchanged, passed_on = [], []
    all_to_all, broadcast = dist.all_to_all_single, dist.broadcast

    def counted_all_to_all(output: Tensor, tensor: Tensor, *others: Any, **named: Any) -> None:
        exchanged.append(tensor.numel())
        all_to_all(output, tensor, *others, **named)

    def counted_broadcast(tensor: Tensor, **named: Any) -> None:
        passed_on.append(tensor.numel())
        broadcast(tensor, **named)

    with patch.multiple(dist, all_to_all_single=counted_all_to_all, broadcast=counted_broadcast):
        apply(owners, [local_part(parameter) for parameter in parameters])
    return sum(exchanged), sum(passed_on), sum(local_part(parameter).numel() for parameter in parameters)


def test_messages_do_not_grow_with_the_number_of_replicas() -> None:
    """Each result is broadcast once, also if some replicas own no matrix of a round."""
    for (sizes, count), *ranks in zip(MESSAGES, *run_ranks(messages, 4), strict=True):
        for _, passed_on, own in ranks:
            assert passed_on == (own if sizes[0] > 1 else 0), (sizes, count)
        assert sum(exchanged for exchanged, *_ in ranks) == 2 * 12 * 8 * count, (sizes, count)


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (8, 8)])
def test_singular_values_end_near_1(shape: tuple[int, int]) -> None:
    left, values, right = torch.linalg.svd(function(full(shape, 0)), full_matrices=False)
    assert values.min() > 0.6
    assert values.max() < 1.25
    reference = torch.linalg.svd(full(shape, 0), full_matrices=False)
    torch.testing.assert_close(left @ right, reference.U @ reference.Vh, rtol=0, atol=1e-9)
    assert not function(torch.zeros(shape)).any()
