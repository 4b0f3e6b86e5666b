"""Work that all ranks do together, and whose failure on one of them is known to all."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log

T = TypeVar("T")


class RanksError(UserError):
    """Some ranks failed; raised on all of them with the same text: what happened on the first of them."""


def together(work: Callable[[], T], group: dist.ProcessGroup) -> list[T]:
    """What `work()` returned on each rank of `group`, by rank. A collective. Raises RanksError.

    group: of gloo. The values travel between the ranks' processes as pickles.
    """
    outcome: tuple[str, None] | tuple[None, T]
    try:
        outcome = None, work()
    except Exception as error:
        outcome = _said(error), None
    outcomes: list[tuple[str | None, T]] = [(None, outcome[1])] * group.size()  # type: ignore[list-item]
    dist.all_gather_object(outcomes, outcome, group=group)
    for rank, (failure, _) in enumerate(outcomes):
        if failure is not None:
            raise RanksError(f"rank {rank}: {failure}")
    return [value for _, value in outcomes]


def first_failure(error: dcp.CheckpointException) -> RanksError:
    """What DCP raises on all ranks, as the error of the first rank that failed."""
    rank, (cause, _) = min(error.failures.items())
    return RanksError(f"rank {rank}: {_said(cause)}")


def on_first(work: Callable[[], T], group: dist.ProcessGroup) -> T:
    """What `work()` returned on rank 0, where alone it is called. A collective. Raises RanksError."""
    return together(lambda: work() if dist.get_rank(group) == 0 else None, group)[0]  # type: ignore[return-value]


def warn_once(message: str, group: dist.ProcessGroup) -> None:
    """A warning that all ranks have come to alike: from rank 0 alone. No collective."""
    if dist.get_rank(group) == 0:
        log.warning("%s", message)


def _said(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {error}"
