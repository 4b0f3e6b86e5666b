"""Results and errors of work on all ranks or on rank 0; facts that must be equal; flags agreed on one step late."""

import errno
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import distributed_c10d

from tests.pool import run_ranks
from titanlite.checkpoint.manifest import InvalidCheckpointError
from titanlite.checkpoint.storage import first_failure
from titanlite.ranks.agreement import (
    Agreement,
    RanksError,
    decide_on_rank_0,
    require_equal,
    run_on_all_ranks,
    run_on_rank_0,
    run_together,
    share_from_rank_0,
)
from titanlite.ranks.distributed import World
from titanlite.ranks.launch import RankError
from titanlite.runtime.errors import ConfigError, LateRanksError, UsageError, UserError
from titanlite.runtime.retry import may_pass


def raising(error: BaseException) -> Callable[[], Any]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize("value", [None, 0, "text", {"a": [1, (2,)]}, {3: InvalidCheckpointError}])
def test_results_are_returned(group: dist.ProcessGroup, value: Any) -> None:
    assert run_on_all_ranks(lambda: value, group) == [value]
    assert run_on_rank_0(lambda: value, group) == run_together(lambda: value, group) == value


ERRORS = [
    (OSError(errno.ENOSPC, "No space left on device", "/a/b"), "/a/b: No space left on device"),
    (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    (OSError("bare"), "OSError: bare"),
    (UserError("what to do"), "what to do"),
    (RanksError("rank 2: it"), "rank 2: it"),
    (ValueError("odd"), "ValueError: odd"),
    (InvalidCheckpointError("a is missing"), "InvalidCheckpointError: a is missing"),
    (KeyError("k"), "KeyError: 'k'"),
]


@pytest.mark.parametrize(("error", "text"), ERRORS)
def test_an_error_is_raised_with_its_rank(group: dist.ProcessGroup, error: Exception, text: str) -> None:
    for collective in (run_together, run_on_all_ranks, run_on_rank_0):
        with pytest.raises(RanksError) as caught:
            collective(raising(error), group)
        assert str(caught.value) == f"rank 0: {text}"
    assert isinstance(caught.value, UserError)
    assert may_pass(caught.value) == may_pass(error)


def test_a_failed_allocation_has_the_peak_and_a_remedy_on_all_ranks(group: dist.ProcessGroup) -> None:
    """Some of torch's errors are plain RuntimeErrors, and some are wrapped."""
    wrapped = ValueError("broken")
    wrapped.__cause__ = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nmore")
    pattern = r"rank 0: out of memory: peak [\d.]+ GiB, the device has [\d.]+ GiB; titanlite plan CONFIG .* \({}\)"
    for error, last in ((MemoryError(), "MemoryError"), (wrapped.__cause__, ".* you tried"), (wrapped, "broken")):
        with pytest.raises(RanksError) as caught:
            run_on_all_ranks(raising(error), group)
        assert re.fullmatch(pattern.format(last), str(caught.value))


def test_an_interrupt_is_not_converted_to_a_ranks_error(group: dist.ProcessGroup) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_on_all_ranks(raising(KeyboardInterrupt()), group)
    assert run_on_all_ranks(lambda: 1, group) == [1]


@pytest.mark.parametrize(("error", "text"), [*ERRORS, (ConfigError([]), str(ConfigError([])))])
def test_rank_0_shares_its_result_or_its_error(error: Exception, text: str) -> None:
    store = dist.HashStore()
    first, other = (World(rank, rank, 2, "cpu") for rank in range(2))
    with pytest.raises(type(error)):
        share_from_rank_0("fails", raising(error), first, store, 5)
    with pytest.raises(UserError, match=f"^{re.escape(text)}$") as caught:
        share_from_rank_0("fails", raising(AssertionError()), other, store, 5)
    assert caught.value.is_shared
    assert isinstance(caught.value, UsageError) == isinstance(error, UsageError)
    assert may_pass(caught.value) == may_pass(error)
    assert share_from_rank_0("works", lambda: (1, "a"), first, store, 5) == [1, "a"]
    assert share_from_rank_0("works", lambda: (2, "b"), other, store, 5) == [1, "a"]


def test_late_ranks_of_many_are_named() -> None:
    store = dist.HashStore()
    for rank in {*range(600)} - {0, 300, 599}:
        store.set(f"text/{rank}", "")
    with pytest.raises(LateRanksError, match="from rank 300 and 1 more") as caught:
        decide_on_rank_0("", len, World(0, 0, 600, "cpu"), store, 1)
    assert caught.value.ranks == (300, 599)


def test_a_late_rank_0_is_named() -> None:
    with pytest.raises(LateRanksError, match="no message within 1 s from rank 0"):
        share_from_rank_0("late", lambda: 1, World(1, 1, 2, "cpu"), dist.HashStore(), 1)


@pytest.mark.parametrize(("error", "text"), ERRORS)
def test_the_error_of_the_lowest_rank_is_taken_from_dcps_failures(error: Exception, text: str) -> None:
    failures: dict[int, Any] = {
        7: (error, None),  # type: ignore[dict-item]
        3: (error, None),
        11: (ValueError("another"), None),
    }
    assert str(first_failure(dcp.CheckpointException("several", failures))) == f"rank 3: {text}"


def compare(facts: Sequence[dict[str, str]]) -> list[BaseException | None]:
    """The error of each rank, in a thread each, after a comparison of facts[rank]."""
    store = dist.HashStore()

    def compare_rank(rank: int) -> None:
        require_equal("test", facts[rank], World(rank, rank, len(facts), "cpu"), store, 20)

    with ThreadPoolExecutor(len(facts)) as pool:
        return [future.exception() for future in [pool.submit(compare_rank, rank) for rank in range(len(facts))]]


def test_equal_facts_are_accepted() -> None:
    assert compare([{"a": "1", "b": "2"}, {"b": "2", "a": "1"}, {"a": "1", "b": "2"}]) == [None] * 3


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_on_all_others() -> None:
    store = dist.HashStore()

    def decide(rank: int) -> int:
        return decide_on_rank_0("text", len, World(rank, rank, 4, "cpu"), store, 1)

    with ThreadPoolExecutor(3) as pool:
        errors = [future.exception() for future in [pool.submit(decide, rank) for rank in (0, 1, 3)]]
    assert [error.ranks for error in errors if isinstance(error, LateRanksError)] == [(2,)] * 3
    assert str(errors[0]) == "no message within 1 s from rank 2"


def test_a_module_of_one_rank_is_a_warning_and_another_version_a_difference(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titanlite.runtime.logging.log.propagate", True)
    facts = {"a": "1", "module z": "1"}
    assert compare([facts | {"module x": "1"}, facts, facts | {"module y": "2"}]) == [None] * 3
    host = socket.gethostname()
    (line,) = set(caplog.messages)  # earlier tests may have added a second handler
    assert line.endswith(f"some ranks have imported are not compared: x (rank 0 on {host}), y (rank 2 on {host})")
    assert all(isinstance(error, UsageError) for error in compare([{"module x": "1"}, {"module x": "2"}]))


def test_all_ranks_report_each_group_of_different_ranks() -> None:
    common = {f"key{n}": "1" for n in range(8)}
    errors = compare([common, common | {"key3": "2"}, common, common | {"key3": "2"}, {"new": "x"}])
    host = socket.gethostname()
    assert [str(error) for error in errors] == 5 * [
        f"""\
the ranks differ, so nothing was trained; make them equal on all nodes, and start again:

  rank 1 on {host} and 1 more ranks
    key3: 2; on rank 0 on {host}: 1

  rank 4 on {host}
    key0: absent; on rank 0 on {host}: 1
    key1: absent; on rank 0 on {host}: 1
    key2: absent; on rank 0 on {host}: 1
    key3: absent; on rank 0 on {host}: 1
    key4: absent; on rank 0 on {host}: 1
    and 4 more"""
    ]
    assert all(isinstance(error, UsageError) for error in errors)


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


def fail_on_some() -> list[str]:
    """The messages and results of work that fails on no rank, on two, and on rank 0 alone."""
    rank, found = dist.get_rank(), []
    for failing in ((), (2, 1), (0,)):
        for collective in (run_together, run_on_all_ranks, run_on_rank_0):

            def work() -> str:
                if rank in failing:  # noqa: B023
                    raise ValueError(f"of {rank}")
                return f"by {rank}"

            try:
                found.append(f"{collective(work, group())}")
            except RanksError as error:
                found.append(str(error))
    return found


def test_the_lowest_failed_rank_is_named_on_all() -> None:
    def expected(rank: int) -> list[str]:
        done = [f"by {rank}", str([f"by {each}" for each in range(3)]), "by 0"]
        return [*done, *["rank 1: ValueError: of 1"] * 2, "by 0", *["rank 0: ValueError: of 0"] * 3]

    assert run_ranks(fail_on_some, 3) == [expected(rank) for rank in range(3)]


def receive() -> list[int]:
    """The bytes of the tensors that a rank receives for a result of rank 0 of 1 MB."""
    sizes: list[int] = []

    def noted(name: str) -> Callable[..., Any]:
        call = getattr(distributed_c10d, name)

        def collective(*args: Any, **options: Any) -> Any:
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            sizes.append(sum(tensor.nbytes for tensor in tensors))
            return call(*args, **options)

        return collective

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "broadcast", "all_reduce", "gather"):
            patch.setattr(distributed_c10d, name, noted(name))
        assert len(run_on_rank_0(lambda: b"x" * 10**6, group())) == 10**6
    return sizes


def test_a_result_of_rank_0_is_sent_to_each_rank_once() -> None:
    for size in (2, 3):
        for sizes in run_ranks(receive, size):
            assert 10**6 < sum(sizes) < 10**6 + 200


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
