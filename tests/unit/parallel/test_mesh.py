"""Degrees and axes of the mesh for a world size."""

from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from titanlite.parallel import mesh
from titanlite.parallel.mesh import (
    ContextParallel,
    Mesh,
    ParallelismConfig,
    check_parallelism,
    data_degree,
    part_of_rows,
    resolve_degrees,
)
from titanlite.ranks.distributed import World


@pytest.mark.parametrize(
    ("section", "world_size", "axes"),
    [
        (ParallelismConfig(), 1, (1, 1, 1, 1, 1)),
        (ParallelismConfig(), 4, (1, 1, 4, 1, 1)),
        (ParallelismConfig(dp_replicate=2), 4, (1, 2, 2, 1, 1)),
        (ParallelismConfig(dp_replicate=4, dp_shard=1), 4, (1, 4, 1, 1, 1)),
        (ParallelismConfig(dp_replicate=3), 4, (1, 3, 0, 1, 1)),
        (ParallelismConfig(pp=2, tp=2), 4, (2, 1, 1, 1, 2)),
        (ParallelismConfig(cp=2), 8, (1, 1, 4, 2, 1)),
        (ParallelismConfig(pp=2, dp_replicate=2, tp=2), 16, (2, 2, 2, 1, 2)),
    ],
)
def test_remaining_ranks_go_to_dp_shard(section: ParallelismConfig, world_size: int, axes: tuple[int, ...]) -> None:
    assert tuple(resolve_degrees(section, world_size).values()) == axes
    assert data_degree(section, world_size) == axes[1] * axes[2]
    assert (check_parallelism(section, world_size) == []) is (0 not in axes)


def test_the_rule_names_the_product_and_the_world() -> None:
    (problem,) = check_parallelism(ParallelismConfig(dp_replicate=2, dp_shard=2), 2)
    assert (
        problem.rule == "world size 2 must be equal to pp x dp_replicate x dp_shard x cp x tp = 1 x 2 x 2 x 1 x 1 = 4"
    )
    assert problem.remedy.startswith("use 4 processes (NGPU=")
    (problem,) = check_parallelism(ParallelismConfig(tp=3), 2)
    assert problem.key == "parallelism.tp"
    assert problem.rule == "world size 2 must be divisible by pp x dp_replicate x cp x tp = 1 x 1 x 1 x 3 = 3"
    assert problem.remedy.startswith("use 3 processes or a multiple of it (NGPU=")
    assert problem.remedy.endswith("in titanlite plan: --world-size ...), or change parallelism.tp")


def meshes(section: ParallelismConfig, world_size: int) -> list[Mesh]:
    return [Mesh(section, World(rank, rank, world_size, "cpu")) for rank in range(world_size)]


def test_pp_is_the_outermost_axis_and_tp_the_innermost() -> None:
    assert [mesh.data_rank for mesh in meshes(ParallelismConfig(dp_replicate=2), 4)] == [0, 1, 2, 3]
    found = meshes(ParallelismConfig(pp=2, dp_replicate=2, tp=2), 8)
    assert {mesh.data_degree for mesh in found} == {2}
    assert [mesh.data_rank for mesh in found] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [mesh.is_data_leader for mesh in found] == [True, False, True, *[False] * 5]
    assert [mesh.is_first(["dp_replicate", "dp_shard", "tp"]) for mesh in found] == [True, *[False] * 3] * 2
    assert found[6].coordinate == {"pp": 1, "dp_replicate": 1, "dp_shard": 0, "cp": 0, "tp": 0}


def test_data_ranks_are_ordered_by_replica_then_shard() -> None:
    found = meshes(ParallelismConfig(dp_replicate=2, dp_shard=3, tp=2), 12)
    assert [mesh.data_rank for mesh in found] == [rank // 2 for rank in range(12)]
    places = [(mesh.coordinate["dp_replicate"], mesh.coordinate["dp_shard"]) for mesh in found]
    assert [3 * replica + shard for replica, shard in places] == [mesh.data_rank for mesh in found]


@pytest.mark.parametrize("reads_other_rows", [False, True])
def test_an_added_axis_is_supported(reads_other_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data ranks, data leaders and loss leaders with an added axis, on 2 x 2 x 2 x 2 x 2 ranks."""
    monkeypatch.setattr(mesh, "AXES", ("pp", "dp_replicate", "dp_shard", "new", "tp"))
    data_axes = ("dp_replicate", "dp_shard", "new") if reads_other_rows else ("dp_replicate", "dp_shard")
    monkeypatch.setattr(mesh, "DATA_AXES", data_axes)
    section: Any = SimpleNamespace(pp=2, dp_replicate=2, dp_shard=2, new=2, tp=2, ep=1, context_parallel="heads")
    ranks = [Mesh(section, World(rank, rank, 32, "cpu")) for rank in range(32)]
    degree = 8 if reads_other_rows else 4
    assert {one.data_degree for one in ranks} == {degree}
    assert sorted(one.data_rank for one in ranks if one.is_data_leader) == list(range(degree))
    counting = [(one.coordinate["pp"], one.data_rank) for one in ranks if one.is_loss_leader]
    assert sorted(counting) == [(stage, data_rank) for stage in range(2) for data_rank in range(degree)]


@pytest.mark.parametrize("form", get_args(ContextParallel))
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_each_position_is_on_one_rank(form: ContextParallel, cp: int) -> None:
    """With "gather", all ranks have equally many pairs of a query and a key before it."""
    rows = torch.arange(16).repeat(3, 1)
    parts = [part_of_rows(rows, rank, cp, form) for rank in range(cp)]
    assert all(part.is_contiguous() and part.shape == (3, 16 // cp) for part in parts)
    assert sorted(torch.cat(parts, dim=1)[1].tolist()) == list(range(16))
    if form == "gather":
        assert len({int(part[0].sum()) for part in parts}) == 1
        assert all(part[0].equal(part[0].sort().values) for part in parts)
