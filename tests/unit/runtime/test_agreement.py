"""Results and errors of work on all ranks or on rank 0, with one rank."""

import errno
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from titanlite.checkpoint.storage import InvalidCheckpointError, first_failure
from titanlite.runtime.agreement import RanksError, run_on_all_ranks, run_on_rank_0
from titanlite.runtime.errors import UserError


def raising(error: BaseException) -> Callable[[], Any]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize("value", [None, 0, "text", {"a": [1, (2,)]}, {3: InvalidCheckpointError}])
def test_results_are_returned(group: dist.ProcessGroup, value: Any) -> None:
    assert run_on_all_ranks(lambda: value, group) == [value]
    assert run_on_rank_0(lambda: value, group) == value


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
    for collective in (run_on_all_ranks, run_on_rank_0):
        with pytest.raises(RanksError) as caught:
            collective(raising(error), group)
        assert str(caught.value) == f"rank 0: {text}"
    assert isinstance(caught.value, UserError)


def test_an_interrupt_is_not_converted_to_a_ranks_error(group: dist.ProcessGroup) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_on_all_ranks(raising(KeyboardInterrupt()), group)
    assert run_on_all_ranks(lambda: 1, group) == [1]


@pytest.mark.parametrize(("error", "text"), ERRORS)
def test_the_error_of_the_lowest_rank_is_taken_from_dcps_failures(error: Exception, text: str) -> None:
    failures: dict[int, Any] = {
        7: (error, None),  # type: ignore[dict-item]
        3: (error, None),
        11: (ValueError("another"), None),
    }
    assert str(first_failure(dcp.CheckpointException("several", failures))) == f"rank 3: {text}"
