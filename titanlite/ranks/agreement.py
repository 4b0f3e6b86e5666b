"""Agreement between ranks: facts that must be equal, work that raises on all ranks if it fails on one, and flags
exchanged at each step."""

import hashlib
import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from titanlite.ranks.distributed import World, world_from_environment
from titanlite.ranks.failure import FailureReport
from titanlite.ranks.positions import Positions, late_error
from titanlite.ranks.view import BATCH
from titanlite.runtime.environment import raise_open_file_limit
from titanlite.runtime.errors import LateRanksError, UsageError, UserError
from titanlite.runtime.logging import log, setup_logging, warn_in_lines
from titanlite.runtime.memory import describe_out_of_memory, is_out_of_memory
from titanlite.runtime.retry import may_pass
from titanlite.runtime.text import visible
from titanlite.runtime.waiting import parse_value, waiting

T = TypeVar("T")

MODULE = "module "
"""Begins the names of facts that a rank may lack: modules."""
MAX_DIFFERENCES = 5
"""Differences between ranks that a message lists; it counts the others."""
MAX_GROUPS = 16
"""Groups of equal ranks that a message compares: the hosts of a large job may all differ."""


class RanksError(UserError):
    """An error that all ranks raise with the same text. If only some failed, as a rule that of the lowest one."""

    is_shared = True


class DifferentRanksError(UsageError):
    """Facts differ between ranks that must be equal. Raised on all ranks with the same text."""

    is_shared = True


def require_equal(name: str, facts: Mapping[str, str], world: World, store: dist.Store, timeout_s: int) -> None:
    """Raise DifferentRanksError on all ranks unless all ranks give the same facts. Waits for all ranks.

    name: of this comparison, unique in the run. facts: name -> value, as shown in the message. Each rank sends a hash;
    if they differ, one rank of each of the first MAX_GROUPS hashes sends its facts, and rank 0 compares them. It logs a
    warning about modules that only some ranks have imported.
    """
    store = dist.PrefixStore(f"equal/{name}", store)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def group(digests: Sequence[str]) -> list[tuple[int, int]]:
        """The first rank of each hash, and how many ranks have it."""
        counts = Counter(digests)
        return [(digests.index(each), count) for each, count in list(counts.items())[:MAX_GROUPS]]

    groups = decide_on_rank_0(digest, group, world, store, timeout_s)
    if len(groups) <= 1:
        return
    if world.rank in [first for first, _ in groups]:
        store.set(f"facts/{world.rank}", json.dumps({"host": socket.gethostname(), "facts": facts}))
    own_s = -(-timeout_s // 2)  # of rank 0, so that it names a late rank before the others give up on rank 0
    lines = share_from_rank_0("lines", lambda: _compare(groups, store, own_s), world, store, timeout_s)
    if lines:
        head = "the ranks differ, so nothing was trained; make them equal on all nodes, and start again:"
        raise DifferentRanksError(head, *lines)


def _compare(groups: Sequence[tuple[int, int]], store: dist.Store, timeout_s: int) -> list[str]:
    """How each later group differs from rank 0, in lines, as rank 0 reads it from the store. Raises LateRanksError."""
    ranks = [first for first, _ in groups]
    keys = [f"facts/{rank}" for rank in ranks]
    try:
        with waiting(lambda: f"the facts of ranks {ranks}, which differ: see their logs"):
            store.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        late = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
        raise LateRanksError(late or [0], timeout_s) from None
    found = [parse_value(value, _parse_facts) for value in store.multi_get(keys)]
    sent = [each for each in found if each is not None]
    if len(sent) < len(found):
        raise LateRanksError([rank for rank, each in zip(ranks, found, strict=True) if each is None], timeout_s)
    if modules := _describe_modules(ranks, sent):
        log.warning("modules that only some ranks have imported are not compared: %s", modules)
    return _describe_groups(groups, sent)


def decide_on_rank_0(
    text: str, decide: Callable[[Sequence[str]], T], world: World, store: dist.Store, timeout_s: int
) -> T:
    """Return `decide(texts by rank)`, computed on rank 0, on all ranks. Waits for all ranks; needs no process group.

    text: of this rank. store: for this decision only. Errors: as share_from_rank_0; LateRanksError names late ranks.
    """
    keys = [f"text/{rank}" for rank in range(world.size)]

    def decide_here() -> T:
        return decide([each.decode(errors="replace") for each in store.multi_get(keys)])

    store.set(keys[world.rank], text)
    try:
        if world.rank == 0:
            with waiting(lambda: f"the start of all {world.size} ranks: see their logs"):
                store.wait(keys, timedelta(seconds=timeout_s))
        return share_from_rank_0("decision", decide_here, world, store, timeout_s)
    except (dist.DistStoreError, LateRanksError):

        def look() -> list[int]:
            batches = (range(first, min(first + BATCH, world.size)) for first in range(0, world.size, BATCH))
            incomplete = [batch for batch in batches if not store.check([keys[rank] for rank in batch])]
            return [rank for batch in incomplete for rank in batch if not store.check([keys[rank]])]

        raise late_error(store, world.rank, world.size, timeout_s, look) from None


def share_from_rank_0(name: str, work: Callable[[], T], world: World, store: dist.Store, timeout_s: int) -> T:
    """As share_from_rank, of rank 0, with all ranks."""
    return share_from_rank(0, name, work, world, store, timeout_s)


def share_from_rank(rank: int, name: str, work: Callable[[], T], world: World, store: dist.Store, timeout_s: int) -> T:
    """Run `work()` on one rank only; returns its result, sent as JSON, on all ranks that call this. Needs no process
    group.

    name: of the key in the store, unique in the run. If `work` fails, the rank raises its error, and the others raise a
    UserError with the same text, which only that rank prints. Raises LateRanksError if it takes longer than timeout_s.
    """
    if world.rank == rank:
        try:
            store.set(name, json.dumps({"result": work()}))
        except Exception as error:
            facts = {"is_usage": isinstance(error, UsageError), "may_pass": may_pass(error)}
            store.set(name, json.dumps({"error": describe_failure(error), **facts}))
            raise
    try:
        with waiting(lambda: f"rank {rank} ({name}): see its log"):
            store.wait([name], timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        raise LateRanksError([rank], timeout_s) from None
    sent = parse_value(store.get(name), parse_shared)  # on that rank, too: a tuple becomes a list on all ranks
    if sent is None:
        raise LateRanksError([rank], timeout_s)
    if "error" in sent:
        shared = (UsageError if sent["is_usage"] else UserError)(*sent["error"].split("\n"))
        shared.is_shared, shared.may_pass = True, sent["may_pass"]
        raise shared
    result: T = sent["result"]
    return result


def parse_shared(value: bytes) -> dict[str, Any]:
    """The result or the error that a rank has shared."""
    sent: dict[str, Any] = json.loads(value)
    if "result" in sent:
        return {"result": sent["result"]}
    return {"error": str(sent["error"]), "is_usage": bool(sent.get("is_usage")), "may_pass": bool(sent["may_pass"])}


def _parse_facts(value: bytes) -> dict[str, Any]:
    sent = json.loads(value)
    return {"host": str(sent["host"]), "facts": {str(key): str(fact) for key, fact in sent["facts"].items()}}


def _describe_groups(groups: Sequence[tuple[int, int]], sent: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe how each later group differs from rank 0. sent: host and facts of the first rank of each group."""
    lines: list[str] = []
    first = sent[0]["facts"]
    for (rank, count), each in zip(groups[1:], sent[1:], strict=True):
        if differences := describe_differences(each["facts"], first, f"on rank 0 on {sent[0]['host']}"):
            lines += ["", f"  rank {rank} on {each['host']}" + (f" and {count - 1} more ranks" if count > 1 else "")]
            lines += differences
    return lines


def describe_differences(facts: Mapping[str, str], first: Mapping[str, str], where: str) -> list[str]:
    """A line for each of the first MAX_DIFFERENCES facts that differ. where: the place of `first`."""
    keys = [key for key in sorted({*first, *facts}) if first.get(key) != facts.get(key)]
    # A module that only some ranks have imported, such as a profiler, is no difference.
    keys = [key for key in keys if not key.startswith(MODULE) or {key} <= first.keys() & facts.keys()]
    lines = [f"    {key}: {facts.get(key, 'absent')}; {where}: {first.get(key, 'absent')}" for key in keys]
    more = [f"    and {len(keys) - MAX_DIFFERENCES} more"] if len(keys) > MAX_DIFFERENCES else []
    return [*lines[:MAX_DIFFERENCES], *more]


def _describe_modules(ranks: Sequence[int], sent: Sequence[Mapping[str, Any]]) -> str:
    """Name the modules that only some groups have imported, with the first rank that has; "" for no such module.

    ranks: the first one of each group.
    """
    holders: dict[str, list[int]] = {}
    for number, each in enumerate(sent):
        for key in each["facts"]:
            if key.startswith(MODULE):
                holders.setdefault(key.removeprefix(MODULE), []).append(number)
    found = [
        f"{module} (rank {ranks[numbers[0]]} on {sent[numbers[0]]['host']})"
        for module, numbers in sorted(holders.items())
        if len(numbers) < len(sent)
    ]
    more = [f"and {len(found) - MAX_DIFFERENCES} more"] if len(found) > MAX_DIFFERENCES else []
    return ", ".join([*found[:MAX_DIFFERENCES], *more])


def run_together(work: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Run `work()` on each rank of `group`; returns this rank's result, once all ranks have succeeded.

    A collective: the lowest rank that failed is found by a reduction, and only its error is sent. group: a gloo group.
    Raises RanksError.
    """
    failure: tuple[str, bool] | None = None
    try:
        value = work()
    except Exception as error:
        failure = describe_failure(error), may_pass(error)
    first = torch.tensor(group.size() if failure is None else dist.get_rank(group))
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=group)
    if (rank := int(first)) < group.size():
        text, passes = _sent_by(rank, failure or ("", False), group)
        shared = RanksError(*f"rank {rank}: {text}".split("\n"))
        shared.may_pass = passes
        raise shared
    return value


def run_on_all_ranks(work: Callable[[], T], group: dist.ProcessGroup) -> list[T]:
    """As run_together; returns the results of all ranks, by rank, on all ranks: for small ones. They are sent as
    pickles, each as long as the longest."""
    value = run_together(work, group)
    values: list[T] = [value] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def run_on_rank_0(work: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Run `work()` on rank 0 only; returns its result on all ranks. A collective. Raises RanksError."""
    value = run_together(lambda: work() if dist.get_rank(group) == 0 else None, group)
    return _sent_by(0, value, group)  # type: ignore[return-value]


def gather_on_rank_0(value: T, group: dist.ProcessGroup) -> list[T]:
    """The values of all ranks, by rank, on rank 0; [] on the others. A collective; the values are sent as pickles."""
    values = [value] * group.size() if dist.get_rank(group) == 0 else None
    dist.gather_object(value, values, group_dst=0, group=group)
    return values or []


def _sent_by(rank: int, value: T, group: dist.ProcessGroup) -> T:
    """The value of `rank` of the group, sent to all others as a pickle. A collective."""
    values = [value]
    dist.broadcast_object_list(values, group_src=rank, group=group)
    return values[0]


def all_ranks_arrive(group: dist.ProcessGroup, seconds: float) -> bool:
    """Whether all ranks of a gloo group call this within `seconds`, as they do after an error that all raise."""
    try:
        dist.monitored_barrier(group, timedelta(seconds=seconds))
    except RuntimeError:
        return False
    return True


def warn_on_rank_0(lines: Sequence[str], group: dist.ProcessGroup) -> None:
    """Log a warning of these lines on rank 0 only. Not a collective."""
    if dist.get_rank(group) == 0:
        warn_in_lines(lines)


def describe_failure(error: BaseException) -> str:
    """Describe an error for other ranks: in one line, or the lines of a UserError."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, UserError):
        return str(error)
    if is_out_of_memory(error):
        return describe_out_of_memory(error)
    return visible(f"{type(error).__name__}: {error}")


class Agreement:
    """The element-wise maximum of `count` integers over all ranks, one exchange late, to overlap with training.

    group: a gloo group of all ranks that only this thread uses, so that all ranks begin its collectives in one order;
    None: one process. One all-reduce of a few bytes is in flight between two exchanges.
    """

    def __init__(self, group: dist.ProcessGroup | None, count: int) -> None:
        self._group = group
        self._values = torch.zeros(count, dtype=torch.int64)
        self._work: dist.Work | None = None

    def exchange(self, values: Sequence[int]) -> list[int]:
        """Submit this rank's values; returns the maximum of the previous exchange, initially zeros. A collective.

        Waits until all ranks have reached the previous exchange. Raises RuntimeError if a rank has ended, or after the
        group's timeout.
        """
        agreed = self.finish()
        self._values = torch.tensor(values, dtype=torch.int64)
        if self._group is not None:
            self._work = dist.all_reduce(self._values, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return agreed

    def finish(self) -> list[int]:
        """Return the maximum of the last exchange; nothing is in flight afterwards. A collective; errors: exchange."""
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()
        values: list[int] = self._values.tolist()
        return values


class FiniteData(Protocol):
    """Data with finite sources. ended: per source, whether this rank's streams have exhausted it."""

    ended: list[bool]

    def ended_after_next(self) -> list[bool]:
        """Return `ended` at the end of the next step; waits until that step's batch is prepared."""
        ...


class DataEnd:
    """Agreement of all ranks on exhausted sources. Ranks submit one step ahead, so a step's result is known at its end.

    data: None if all sources repeat without limit. group: see Agreement.
    """

    def __init__(self, data: FiniteData | None, group: dist.ProcessGroup | None) -> None:
        self._data = data
        self._agreement = Agreement(group, len(data.ended) if data else 0)

    def before_training(self) -> list[bool]:
        """Return per source whether all ranks have exhausted it before the first step. A collective."""
        if self._data is not None:
            self._submit(self._data.ended)
        return self.after_step()

    def after_step(self) -> list[bool]:
        """Return per source whether all ranks have exhausted it after the current step. A collective."""
        if self._data is None:
            return []
        ended = [left == 0 for left in self._agreement.finish()]
        if not any(ended):
            self._submit(self._data.ended_after_next())
        return ended

    def _submit(self, ended: Sequence[bool]) -> None:
        self._agreement.exchange([not source for source in ended])


def start_rank() -> tuple[World, dict[str, str]]:
    """Set up logging and the limit of open files of this rank. Returns (the ranks, the environment variables at start).

    Raises UserError.
    """
    raise_open_file_limit()
    environment = dict(os.environ)
    world = world_from_environment()
    setup_logging(world.rank)
    return world, environment


def watch_ranks(
    failure: FailureReport, world: World, store: dist.Store, dump_folder: str | None, silence_s: float
) -> None:
    """Let all ranks of a program report failures together from now on. dump_folder, silence_s: see Positions."""
    local = world.local_ranks
    store = dist.PrefixStore("positions", store)
    positions = Positions(
        store, world.rank, world.size, local, dump_folder, silence_s, on_silence=failure.end_from_thread
    )
    positions.start_process()
    failure.connected(positions)
