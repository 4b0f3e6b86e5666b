"""Flags that all ranks agree on, one step late."""

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import run_ranks
from titanlite.ranks.agreement import Agreement
from titanlite.ranks.launch import RankError

# Flags of each rank at the end of each step, and the agreed flags at the end of the next step.
FLAGS = [[[0, 0], [0, 0], [2, 0], [2, 0], [0, 0]], [[0, 0], [0, 1], [0, 0], [15, 0], [0, 0]]]
AGREED = [[0, 0], [0, 1], [2, 0], [15, 0], [0, 0]]


def group(timeout_s: float = 30.0) -> dist.ProcessGroup:
    made = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert made is not None
    return made


def agree(slow_rank: int) -> list[Any]:
    rank = dist.get_rank()
    agreement = Agreement(group(), 2)
    found = []
    for flags in FLAGS[rank]:
        if rank == slow_rank:
            time.sleep(0.1)
        dist.all_reduce(torch.zeros(4))  # a collective of the step itself, on another group
        found.append(agreement.exchange(flags))
    return [*found, agreement.finish(), agreement.finish()]


@pytest.mark.parametrize("slow_rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_all_ranks_get_the_maximum_of_the_previous_step(slow_rank: int) -> None:
    assert run_ranks(agree, 2, slow_rank) == [[[0, 0], *AGREED, AGREED[-1]]] * 2


def test_one_process_needs_no_group() -> None:
    agreement = Agreement(None, 2)
    assert [agreement.exchange(flags) for flags in FLAGS[0]] == [[0, 0], *FLAGS[0][:-1]]
    assert agreement.finish() == FLAGS[0][-1]


def launch_without_waiting() -> float:
    """Return how long rank 0 waits in the exchange of a step that rank 1 reaches a second later."""
    agreement = Agreement(group(), 2)
    agreement.exchange([0, 0])
    if dist.get_rank() == 1:
        time.sleep(1)
    begin = time.monotonic()
    agreement.exchange([0, 0])
    waited_s = time.monotonic() - begin
    agreement.finish()
    return waited_s


@pytest.mark.slow
def test_an_exchange_does_not_wait_for_a_late_rank_of_the_same_step() -> None:
    assert run_ranks(launch_without_waiting, 2)[0] < 0.5


def lose_a_rank(how: str) -> Any:
    """Return whether rank 0 raises if rank 1 never reaches the second step."""
    agreement = Agreement(group(timeout_s=1.0), 2)
    agreement.exchange([0, 0])
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(4)
        return None
    begin = time.monotonic()
    try:
        agreement.exchange([0, 0])
        agreement.exchange([0, 0])
    except RuntimeError as error:
        assert time.monotonic() - begin < 3
        if how == "killed":
            raise ValueError(f"raised: {error}") from None
        return "raised"
    return "not raised"


@pytest.mark.slow
def test_a_hanging_rank_raises_after_the_groups_timeout() -> None:
    assert run_ranks(lose_a_rank, 2, "hangs") == ["raised", None]


def test_a_killed_rank_raises() -> None:
    with pytest.raises(RankError, match="ValueError: raised"):
        run_ranks(lose_a_rank, 2, "killed")
