"""torch's flight recorder: what it records on gloo, and which rank others wait for."""

import json
import os

import pytest
import torch
import torch.distributed as dist

from tests.pool import run_ranks
from titanlite.ranks.distributed import enable_flight_recorder
from titanlite.ranks.positions import last_numbers, ranks_behind
from titanlite.runtime.torch_internals import recorded_collectives


def _collectives_of_a_rank() -> tuple[dict[str, int], list[str]]:
    pairs = [dist.new_group([0, 1]), dist.new_group([0])]
    for _ in range(3):
        dist.all_reduce(torch.ones(4), group=pairs[0])
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4), group=pairs[1])
    recorded = recorded_collectives()
    operations = [entry["profiling_name"] for entry in json.loads(recorded["gloo"])["entries"]]
    return last_numbers(recorded), operations


@pytest.mark.skipif(not recorded_collectives(), reason="this torch has no JSON dump")
def test_collectives_are_recorded_on_gloo() -> None:
    (first, operations), (second, _) = run_ranks(_collectives_of_a_rank, 2)
    assert "gloo:all_reduce" in operations
    assert set(second) < set(first)  # groups have the same name on all of their ranks
    assert ranks_behind({0: first, 1: second}) == []


def test_the_environment_decides_on_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    enable_flight_recorder()
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "512"
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    enable_flight_recorder()
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "0"


def test_without_a_recorder_there_are_no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on older versions of torch."""
    monkeypatch.setattr(torch._C, "_distributed_c10d", object())
    assert recorded_collectives() == {}
    assert last_numbers({"gloo": '{"pg_config": {}}'}) == {}


@pytest.mark.parametrize(
    ("last", "behind"),
    [
        ([{"world": 7}, {"world": 7}], []),
        ([{"world": 7}, {"world": 6}], [1]),
        # Rank 3 has stopped. Rank 2 waits for it in their tp group, ranks 0 and 1 wait for both in their dp groups.
        ([{"tp0": 5, "dp0": 9}, {"tp0": 5, "dp1": 9}, {"tp1": 5, "dp0": 8}, {"tp1": 4, "dp1": 8}], [3]),
        ([{"world": 7, "only 0": 3}, {"world": 7}], []),
        ([{"world": 8}, {"world": 7}, {"world": 7}], [1, 2]),
    ],
)
def test_the_rank_that_waits_for_no_other_is_behind(last: list[dict[str, int]], behind: list[int]) -> None:
    assert ranks_behind(dict(enumerate(last))) == behind
