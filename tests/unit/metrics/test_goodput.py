"""Wall time by cause, without gaps and over restarts; slow ranks."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import run_ranks
from titanlite.metrics.meter import Place, Slowest, SlowRanks
from titanlite.metrics.timing import CAUSES, COLUMNS, PHASES, Goodput
from titanlite.profiling.regions import ComputeTime
from titanlite.runtime.logging import log


class Clock:
    """A clock that is set by hand. boot: what the unix clock shows at 0."""

    def __init__(self, boot: float = 1e9) -> None:
        self.now, self.boot = 0.0, boot

    def __call__(self) -> float:
        return self.now

    def unix(self) -> float:
        return self.boot + self.now


def started(clock: Clock, earlier: dict[str, Any], began: float) -> Goodput:
    return Goodput(earlier, began=began, clock=clock, unix_clock=clock.unix)


def pass_phases(goodput: Goodput, clock: Clock, *phases: tuple[str, float]) -> None:
    for phase, seconds in phases:
        goodput.enter(phase)
        clock.now += seconds


NOTHING = dict.fromkeys(CAUSES, 0.0)
STEP = ("forward, backward and update", 10.0)


def seconds_of(columns: dict[str, float]) -> dict[str, float]:
    return {cause: columns[f"time_s/{cause}"] for cause in CAUSES}


def test_all_of_the_wall_time_is_divided_among_the_causes() -> None:
    """Until the first step, waiting for data is a part of the start."""
    clock = Clock()
    clock.now = 7.0
    goodput = started(clock, {}, began=4.0)
    pass_phases(goodput, clock, ("waiting for data", 2.0), STEP, ("logging", 1.0), ("comparing replicas", 0.5))
    pass_phases(goodput, clock, ("saving", 3.0), ("validating", 4.0), ("sampling", 0.25))
    pass_phases(goodput, clock, ("waiting for data", 6.0), STEP)
    columns = goodput.columns()
    assert tuple(columns) == COLUMNS
    lost = {"start": 5.0, "data": 6.0, "saving": 3.0, "validation": 4.0, "other": 0.75}
    assert seconds_of(columns) == NOTHING | lost | {"steps": 21.0}
    assert sum(seconds_of(columns).values()) == goodput.wall_s == clock.now - 4.0
    assert columns["goodput"] == 21.0 / 39.75
    assert columns["unix_time"] == clock.unix()
    expected = "52.8% of 40 s in steps; start 12.6%, data 15.1%, saving 7.5%, validation 10.1%, other 1.9%"
    assert goodput.describe() == expected


def test_a_restart_continues_from_the_row_of_the_resumed_step() -> None:
    """Steps after this row, which are computed again, and the time without a process are lost by the restart."""
    first = Clock()
    goodput = started(first, {}, began=0.0)
    pass_phases(goodput, first, STEP)
    row = {"step": 1, **goodput.columns()}
    pass_phases(goodput, first, STEP)  # lost
    second = Clock(boot=first.unix() + 100 - 50)  # 100 s later, by a process whose clock shows 50
    second.now = 50.0
    again = started(second, row, began=45.0)
    second.now += 5.0
    pass_phases(again, second, ("waiting for data", 1.0), STEP)
    seconds = seconds_of(again.columns())
    assert seconds == NOTHING | {"steps": 20.0, "restart": 10.0 + 100 + 5 + 1}
    assert again.wall_s == second.unix() - 1e9


def test_a_clock_that_was_set_back_loses_nothing() -> None:
    clock = Clock(boot=0.0)
    again = started(clock, {"unix_time": 5e9, "time_s/steps": 3.0}, began=-2.0)
    assert seconds_of(again.columns()) == NOTHING | {"steps": 3.0, "restart": 2.0}


def test_phases_are_those_of_the_training_loop() -> None:
    source = (Path(__file__).parents[3] / "titanlite" / "train.py").read_text()
    assert [phase for phase in PHASES if f'"{phase}"' not in source] == []


FOUR = [Place("a", 0), Place("a", 0), Place("b", 0), Place("b", 0)]


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(log, "warning", lambda message, *values: found.append(message % values))
    return found


def test_a_rank_that_stays_slow_is_named_once(warnings: list[str]) -> None:
    ranks = SlowRanks(FOUR, logs=True)
    for interval in range(6):
        assert ranks.compare(10, [0.1, 0.11, 0.15, 0.1]) == Slowest(2, "b", pytest.approx(1.5))
        assert len(warnings) == (interval >= 1)  # after 20 steps
    assert warnings[0].startswith("rank 2 on b has been slow for 20 steps: it computes and waits for data 1.50 times")
    ranks.compare(50, [0.2, 0.1, 0.2, 0.1])
    assert len(warnings) == 2
    assert warnings[1].startswith("rank 0 on a has been slow for 50 steps")


@pytest.mark.parametrize(
    "intervals",
    [
        [[0.1, 0.129, 0.1, 0.1]] * 9,
        [[0.1, 0.9, 0.1, 0.1], [0.1, 0.1, 0.1, 0.1]] * 9,  # not 20 steps in a row
        [[0.1, 0.9, 0.1, 0.1], [0.1, 0.1, 0.9, 0.1]] * 9,  # not the same rank
        [[0.3, 0.3, 0.1, 0.1]],
        [[0.0, 0.0, 0.0, 0.0]] * 9,
    ],
)
def test_other_ranks_are_not_named(intervals: list[list[float]], warnings: list[str]) -> None:
    ranks = SlowRanks(FOUR, logs=True)
    for compute_s in intervals:
        ranks.compare(10, compute_s)
    assert not warnings


def test_only_ranks_of_one_pipeline_stage_are_compared(warnings: list[str]) -> None:
    """The last stage computes for longer, on all of its ranks; of two ranks, the faster one is the median."""
    ranks = SlowRanks([Place("a", 0), Place("a", 0), Place("b", 1), Place("b", 1)], logs=True)
    assert ranks.compare(100, [0.1, 0.1, 0.5, 0.5]) == Slowest(0, "a", 1.0)
    assert ranks.compare(100, [0.1, 0.1, 0.5, 0.6]) == Slowest(3, "b", pytest.approx(1.2))
    assert not warnings
    assert ranks.compare(100, [0.1, 0.1, 0.8, 0.5]) == Slowest(2, "b", pytest.approx(1.6))
    assert len(warnings) == 1


def test_ranks_without_peers_are_not_compared() -> None:
    assert SlowRanks([Place("a", 0)], logs=True).compare(10, [0.1]) is None
    assert SlowRanks([Place("a", 0), Place("a", 1)], logs=True).compare(10, [0.1, 0.9]) is None


def _compute_s_of_a_step(alone_s: float, busy_s: float) -> list[float]:
    """By rank. Rank 1 sleeps before the first collective, and uses the CPU after it; rank 0 waits for it twice."""
    is_slow = dist.get_rank() == 1
    compute_time = ComputeTime()
    dist.barrier()
    compute_time.start()
    time.sleep(alone_s * is_slow)
    compute_time.before_collectives()
    dist.all_reduce(torch.ones(1))
    end = time.thread_time() + busy_s * is_slow
    while time.thread_time() < end:
        pass
    dist.all_reduce(torch.ones(1))
    own = torch.tensor(compute_time.stop())
    both = [torch.zeros_like(own) for _ in range(2)]
    dist.all_gather(both, own)
    return [value.item() for value in both]


@pytest.mark.slow
def test_a_wait_for_other_ranks_is_no_compute_time() -> None:
    """A thread that waits in gloo uses no CPU time."""
    (waits, slow), _ = run_ranks(_compute_s_of_a_step, 2, 0.5, 0.5)
    assert slow > 0.99
    assert waits < 0.5
