"""What ranks have to agree on: work whose failure on one is known to all, and flags at each step of training."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

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
        outcome = describe_failure(error), None
    outcomes: list[tuple[str | None, T]] = [(None, outcome[1])] * group.size()  # type: ignore[list-item]
    dist.all_gather_object(outcomes, outcome, group=group)
    for rank, (failure, _) in enumerate(outcomes):
        if failure is not None:
            raise RanksError(f"rank {rank}: {failure}")
    return [value for _, value in outcomes]


def on_first(work: Callable[[], T], group: dist.ProcessGroup) -> T:
    """What `work()` returned on rank 0, where alone it is called. A collective. Raises RanksError."""
    return together(lambda: work() if dist.get_rank(group) == 0 else None, group)[0]  # type: ignore[return-value]


def warn_once(message: str, group: dist.ProcessGroup) -> None:
    """A warning that all ranks have come to alike: from rank 0 alone. No collective."""
    if dist.get_rank(group) == 0:
        log.warning("%s", message)


def describe_failure(error: BaseException) -> str:
    """In a line, for the other ranks."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {error}"


class Flags(NamedTuple):
    """What a rank has to say at the end of a step; agreed: the largest value that any rank has said."""

    stop: int = 0
    """Number of the signal that asks to stop; 0: none."""
    save_failed: bool = False
    """A save has failed on this rank."""


class Agreement:
    """The largest of some integers over all ranks, one exchange late, so that nobody waits for it.

    group: a gloo group of all ranks that nothing else uses at the same time; None: one process. One all-reduce of a few
    bytes is in flight between two exchanges.
    """

    def __init__(self, group: dist.ProcessGroup | None, count: int) -> None:
        self._group = group
        self._values = torch.zeros(count, dtype=torch.int64)
        self._work: dist.Work | None = None

    def exchange(self, values: Sequence[int]) -> list[int]:
        """On all ranks, at the same point. Returns what was agreed on at the last exchange; at first zeros.

        Waits for the slowest rank to have come to that exchange. Raises RuntimeError where a rank is gone, or after the
        group's timeout.
        """
        agreed = self.finish()
        self._values = torch.tensor(values, dtype=torch.int64)
        if self._group is not None:
            self._work = dist.all_reduce(self._values, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return agreed

    def finish(self) -> list[int]:
        """What was agreed on at the last exchange, with nothing left in flight. On all ranks; errors as in exchange."""
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()
        values: list[int] = self._values.tolist()
        return values


class Control:
    """Agreement of all ranks on Flags, one step late: every rank acts on the same flags at the same step."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """group: as of Agreement."""
        self._agreement = Agreement(group, len(Flags._fields))

    def exchange(self, flags: Flags) -> Flags:
        """At the end of each step, on all ranks. Returns what was agreed on at the end of the step before. Errors as of
        Agreement."""
        return _flags(self._agreement.exchange(flags))

    def finish(self) -> Flags:
        """What was agreed on at the last exchange, with nothing left in flight. On all ranks; errors as in exchange."""
        return _flags(self._agreement.finish())


def _flags(values: Sequence[int]) -> Flags:
    stop, save_failed = values
    return Flags(stop, bool(save_failed))


class FiniteData(Protocol):
    """ended: of each source, whether this rank's streams have nothing left of it."""

    ended: list[bool]

    def ended_after_next(self) -> list[bool]:
        """What `ended` will be after the next step; waits until that is prepared."""
        ...


class DataEnd:
    """Whether a finite source has ended for all ranks, known in time: a step ahead of the step after which it has.

    data: None if all sources are read for ever. group: as of Agreement.
    """

    def __init__(self, data: FiniteData | None, group: dist.ProcessGroup | None) -> None:
        self._data = data
        self._agreement = Agreement(group, len(data.ended) if data else 0)

    def before_training(self) -> list[bool]:
        """Of each source, whether it has ended already. On all ranks, before the first step of a start."""
        if self._data is not None:
            self._say(self._data.ended)
        return self.after_step()

    def after_step(self) -> list[bool]:
        """Of each source, whether it has ended with the step that is just done. On all ranks, at the end of each."""
        if self._data is None:
            return []
        ended = [left == 0 for left in self._agreement.finish()]
        if not any(ended):
            self._say(self._data.ended_after_next())
        return ended

    def _say(self, ended: Sequence[bool]) -> None:
        self._agreement.exchange([not source for source in ended])
