"""Slow ranks: what counts as compute time, and when a rank is named."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import run_ranks
from titanlite.metrics.meter import Place, Slowest, SlowRanks
from titanlite.metrics.timing import ComputeTime
from titanlite.runtime.logging import log

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
