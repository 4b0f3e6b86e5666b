"""Degrees against the world."""

import pytest

from titanlite.parallel.mesh import (
    ParallelismConfig,
    check_parallelism,
    data_degree,
    data_rank,
    resolve_axes,
    speaks_for_data_rank,
)


@pytest.mark.parametrize(
    ("section", "world_size", "axes"),
    [
        (ParallelismConfig(), 1, (1, 1, 1, 1)),
        (ParallelismConfig(), 4, (1, 1, 4, 1)),
        (ParallelismConfig(dp_replicate=2), 4, (1, 2, 2, 1)),
        (ParallelismConfig(dp_replicate=4, dp_shard=1), 4, (1, 4, 1, 1)),
        (ParallelismConfig(dp_replicate=3), 4, (1, 3, 0, 1)),
        (ParallelismConfig(pp=2, tp=2), 4, (2, 1, 1, 2)),
        (ParallelismConfig(pp=2, dp_replicate=2, tp=2), 16, (2, 2, 2, 2)),
    ],
)
def test_what_is_left_goes_to_dp_shard(
    section: ParallelismConfig, world_size: int, axes: tuple[int, int, int, int]
) -> None:
    assert resolve_axes(section, world_size) == axes
    assert data_degree(section, world_size) == axes[1] * axes[2]
    assert (check_parallelism(section, world_size) == []) is (0 not in axes)


@pytest.mark.parametrize(
    ("section", "world_size", "key"),
    [
        (ParallelismConfig(dp_shard=2), 4, "parallelism.dp_shard"),
        (ParallelismConfig(dp_replicate=8), 4, "parallelism.dp_replicate"),
        (ParallelismConfig(dp_replicate=0), 4, "parallelism.dp_replicate"),
        (ParallelismConfig(dp_shard=0), 4, "parallelism.dp_shard"),
        (ParallelismConfig(dp_shard=-2), 4, "parallelism.dp_shard"),
        (ParallelismConfig(tp=3), 4, "parallelism.tp"),
        (ParallelismConfig(pp=8), 4, "parallelism.pp"),
        (ParallelismConfig(tp=0), 4, "parallelism.tp"),
        (ParallelismConfig(pp=-1), 4, "parallelism.pp"),
    ],
)
def test_what_does_not_fit_is_named(section: ParallelismConfig, world_size: int, key: str) -> None:
    assert [problem.key for problem in check_parallelism(section, world_size)] == [key]


def test_the_rule_names_the_product_and_the_world() -> None:
    (problem,) = check_parallelism(ParallelismConfig(dp_replicate=2, dp_shard=2), 2)
    assert "dp_replicate 2 x dp_shard 2" in problem.rule
    assert "2 processes" in problem.rule


def test_pp_is_the_outermost_axis_and_tp_the_innermost() -> None:
    assert [data_rank(ParallelismConfig(dp_replicate=2), rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    section = ParallelismConfig(pp=2, dp_replicate=2, tp=2)
    assert [data_rank(section, rank, 8) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [speaks_for_data_rank(section, rank, 8) for rank in range(8)] == [True, False, True, *[False] * 5]
