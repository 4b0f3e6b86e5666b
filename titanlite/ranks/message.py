"""The text of a failure report: of an error, and of the ranks that ended, hang or lag.

Does not import torch, which takes seconds, so that Ctrl-C is handled before that import.
"""

import errno
import json
import os
import re
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titanlite.runtime.errors import LateRanksError, UserError

UNREACHED = "a firewall or an interface that the others cannot reach (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
_CONNECTION = re.compile("gloo/transport|Connection (closed|reset) by peer|Timed out waiting|Broken pipe")
_CONNECTION_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}
"""Errors of torch that another rank may have caused, by ending or by not coming."""

MAX_CAUSE = 300
"""Characters of the error of a lost connection that a message shows. It may list a key per rank."""

NO_SPACE = "the disk is full, or has no inodes left for further files: see df -h and df -i"
ALL_RANKS = " 0 default_pg"
"""Names of torch's default group after the backend, see last_numbers."""

ENDED = "completed"
"""State of a collective on a device, in torch's records."""

SILENT_S = 2.0
"""A rank whose heartbeat is older has ended."""


@dataclass
class Seen:
    """What this rank has seen of another rank. count: number of phases entered. state: of the process, see page.py.
    changed_at: when it entered its phase. alive_at: when its watch thread has run. node_at: of the last heartbeat of
    its node. Times by this rank's monotonic clock. alive_tick: this rank's own tick at alive_at."""

    count: int = 0
    step: int = 0
    phase: str = "start-up"
    host: str = "an unknown host"
    state: str = "running"
    has_left: bool = False
    changed_at: float = 0.0
    beats: int = 0
    node_at: float = 0.0
    alive_at: float = 0.0
    alive_tick: int = 0

    def is_lost(self, now: float, silent_s: float) -> bool:
        """Whether the process has ended or is stopped, or its node gives no heartbeat for so long."""
        return self.state != "running" or now - self.node_at > silent_s


def describe_error(
    error: BaseException, rank: str, *, is_brief: bool, explain: Callable[[Sequence[int]], str] | None
) -> str:
    """The message of a rank that prints.

    is_brief: the store is lost. explain: describes the ranks that ended or lag, given those that are late, for a lost
    or slow connection. None: one process.
    """
    if isinstance(error, UserError):
        return describe_user_error(error)
    if limit := _describe_limit(error):
        return f"rank {rank}: {limit}"
    first_line = f"{error}".partition("\n")[0]
    first_line = first_line if len(first_line) <= MAX_CAUSE else f"{first_line[:MAX_CAUSE]} ..."
    late = error.ranks if isinstance(error, LateRanksError) else ()
    is_lost = late or type(error).__name__ in _CONNECTION_TYPES or _CONNECTION.search(first_line)
    if isinstance(error, RuntimeError) and explain is not None and is_lost:
        lost = "" if late else " lost the connection"
        return f"{explain(late)}\n(rank {rank}{lost}: {first_line})"
    if isinstance(error, RuntimeError) and is_brief:  # torch's error for a lost connection
        return f"rank {rank} lost the connection to the other ranks: {error}"
    return f"rank {rank} failed: {type(error).__name__}: {error}"


def describe_user_error(error: UserError) -> str:
    """The lines of the error, `visible`. If its reason is too many open files, or no space, the limit and what to look
    at are added."""
    text = str(error)
    if os.strerror(errno.EMFILE) in text:
        return f"{text}\n({_open_file_limit()})"
    return f"{text}\n({NO_SPACE})" if os.strerror(errno.ENOSPC) in text else text


def _open_file_limit() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"too many open files, the limit is {limit}: raise it before the start, for example by ulimit -n 65536"


def _describe_limit(error: BaseException) -> str:
    """The limit of the system that an error has met, and what to change; "" for another error."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE or (isinstance(error, RuntimeError) and os.strerror(errno.EMFILE) in str(error)):
        return _open_file_limit()
    if isinstance(error, OSError) and number == errno.ENAMETOOLONG:
        return f"the path {error.filename} is too long for the file system: choose a shorter one"
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error)):
        return "out of host memory: use a smaller model or batch, or fewer data.num_workers, or raise ulimit -v"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return "no thread can be started: raise the limit of threads (ulimit -u) or of memory (ulimit -v)"
    return ""


def describe_loss(zero: Sequence[Any] | None, now: float) -> str:
    """Describe the loss of the store. zero: phases entered, step, phase and host of rank 0, and when they were read."""
    last_seen = ""
    if zero is not None and zero[0]:
        _, step, phase, host, at = zero
        last_seen = f"; rank 0 was last seen in step {step} ({phase}) on {host}, {now - at:.1f} s before"
    lost = "the launcher or rank 0 has ended, is stopped, or its node is lost, and the store of the ranks with it"
    return lost + last_seen


def describe_ranks(
    seen: Mapping[int, Seen], own_rank: int, now: float, behind: Sequence[int] = (), *, silent_s: float = SILENT_S
) -> str:
    """Describe the ranks that have ended, or else those with the oldest position, or else those that hold Python's lock
    or are `behind`.

    seen: by rank. behind: see ranks_behind. silent_s: a rank without a heartbeat for longer has ended.
    """
    lost = [rank for rank, each in seen.items() if rank != own_rank and each.is_lost(now, silent_s)]
    if ended := [rank for rank in lost if not seen[rank].has_left]:
        one = seen[ended[0]]
        return (
            f"{_names(ended)} on {one.host}: no heartbeat, in step {one.step} ({one.phase}): killed, out of memory, "
            "stopped, or its node is lost"
        )
    running = {rank: each for rank, each in seen.items() if rank not in lost}
    oldest = min(each.count for each in running.values())
    last = [rank for rank, each in running.items() if each.count == oldest]
    held = [rank for rank in last if rank != own_rank and now - running[rank].alive_at > silent_s]
    one = running[last[0]]
    where = f"in step {one.step} ({one.phase}) for {now - one.changed_at:.0f} s"
    # If most hold it, they wait inside a launch for a device, and so for the others.
    if held and 2 * len(held) <= len(running):
        waits = "in a call that holds Python's lock; the other ranks wait for it"
        return f"{_names(held)} on {running[held[0]].host} hangs or lags: {where}, {waits}"
    if len(last) == len(running) and behind:
        first = seen[behind[0]]
        return f"{_names(behind)} on {first.host} hangs or lags: {where}; the other ranks wait for it in a collective"
    if len(last) == len(running):
        unmet = f", or they meet {UNREACHED}" if one.step == 0 else ""
        still = f"; the threads of {_names(held)} stand still, as in launches that wait for a device" if held else ""
        return f"all ranks are {where}: one of them hangs, or the network is lost{unmet}{still}"
    return f"{_names(last)} on {one.host} hangs or lags: {where}; the other ranks wait for it"


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def last_numbers(recorded: Mapping[str, str]) -> dict[str, int]:
    """The number of the last collective that this process has entered, by backend and group.

    recorded: see recorded_collectives. Groups have the same name on all of their ranks, and numbers count from 1 on
    each of them. Without sends and receives, which the recorder does not number alike on both ranks. Of the default
    group, which all ranks are in, 0 if this process has entered none of its collectives.
    """
    last: dict[str, int] = {}
    for backend, text in recorded.items():
        of_groups: dict[str, list[Mapping[str, Any]]] = {}
        entries = json.loads(text).get("entries", ())
        if not entries or entries[0].get("record_id", 0) == 0:  # else older entries have been dropped
            last[backend + ALL_RANKS] = 0
        for entry in entries:
            if not entry["is_p2p"]:
                name, description = entry["process_group"]
                of_groups.setdefault(f"{backend} {name} {description}", []).append(entry)
        number = _entered_on_device if backend == "nccl" else _last_number
        last |= {group: number(entries) for group, entries in of_groups.items()}
    return last


def _last_number(entries: Sequence[Mapping[str, Any]]) -> int:
    return max(int(entry["collective_seq_id"]) for entry in entries)


def _entered_on_device(entries: Sequence[Mapping[str, Any]]) -> int:
    """The number of the last collective of a group that the device has entered. Hosts run ahead, each differently.

    It is the first one that has not ended. If it has begun, torch knows with TORCH_NCCL_ENABLE_TIMING only.
    """
    is_timed = any(entry.get("time_discovered_started_ns") for entry in entries)
    pending = [entry for entry in entries if entry["state"] != ENDED]
    if not pending:
        return _last_number(entries)
    first = min(pending, key=lambda entry: int(entry["collective_seq_id"]))
    return int(first["collective_seq_id"]) - (is_timed and first["state"] != "started")


def timeout_of_waiting(recorded: bytes) -> float | None:
    """The timeout, in seconds, of the first collective on the device that has not ended; None if all have. recorded: of
    NCCL, see recorded_collectives."""
    pending = (
        entry["timeout_ms"] / 1000
        for entry in json.loads(recorded).get("entries", ())
        # NCCL records the sends and receives of a batch, which it never notes as ended, and the batch itself
        if entry["state"] != ENDED and (not entry["is_p2p"] or entry["profiling_name"] == "nccl:coalesced")
    )
    return next(pending, None)


def ranks_behind(last: Mapping[int, Mapping[str, int]]) -> list[int]:
    """The ranks that others wait for, and that wait for no other rank. last: last_numbers by rank.

    Ranks enter the collectives of their groups in one order. So a rank that is behind in one group and ahead in none
    has stopped between two collectives.
    """
    behind, ahead = set(), set()
    for group in {group for numbers in last.values() for group in numbers}:
        numbers = {rank: each[group] for rank, each in last.items() if group in each}
        behind |= {rank for rank, number in numbers.items() if number < max(numbers.values())}
        ahead |= {rank for rank, number in numbers.items() if number > min(numbers.values())}
    return sorted(behind - ahead)
