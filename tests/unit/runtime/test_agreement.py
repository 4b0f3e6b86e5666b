"""Work whose failure all ranks know, on one rank: what is returned, and what is said."""

import errno
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from titanlite.checkpoint.storage import InvalidCheckpointError, first_failure
from titanlite.runtime.agreement import RanksError, on_first, together
from titanlite.runtime.errors import UserError


def raising(error: BaseException) -> Callable[[], Any]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize("value", [None, 0, "text", {"a": [1, (2,)]}, {3: InvalidCheckpointError}])
def test_values_come_back(group: dist.ProcessGroup, value: Any) -> None:
    assert together(lambda: value, group) == [value]
    assert on_first(lambda: value, group) == value


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
def test_an_error_is_said_with_its_rank(group: dist.ProcessGroup, error: Exception, text: str) -> None:
    for collective in (together, on_first):
        with pytest.raises(RanksError) as caught:
            collective(raising(error), group)
        assert str(caught.value) == f"rank 0: {text}"
    assert isinstance(caught.value, UserError)


def test_an_interrupt_is_no_failure_to_agree_on(group: dist.ProcessGroup) -> None:
    with pytest.raises(KeyboardInterrupt):
        together(raising(KeyboardInterrupt()), group)
    assert together(lambda: 1, group) == [1]


@pytest.mark.parametrize(("error", "text"), ERRORS)
def test_of_dcps_failures_the_first_ranks_is_told(error: Exception, text: str) -> None:
    failures: dict[int, Any] = {
        7: (error, None),  # type: ignore[dict-item]
        3: (error, None),
        11: (ValueError("another"), None),
    }
    assert str(first_failure(dcp.CheckpointException("several", failures))) == f"rank 3: {text}"
