"""The heartbeats of a node: one process or thread writes those of all its ranks under one key of the store.

As a rule, a process that the first rank of the node forks collects: neither a held lock of Python nor the end of a rank
stops it. If it is lost, or was never started, a thread of the lowest rank that still runs takes over. A rank whose
memory no other process can read, as in a container of its own, collects for itself.

Keys: page/RANK: its host, and the address of its page. collectors: their number. node/N, N from 1: the ranks of a
collector, each interval. where/RANK: that number. collectives/N: on request. zero: the position of rank 0. stacks: the
folder for stacks, once one is asked for.
"""

import ctypes
import gc
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import torch.distributed as dist

from titanlite.ranks import election
from titanlite.ranks.page import Page
from titanlite.runtime.waiting import SETTLE_S, parse_value

INTERVAL_S = 0.5
"""Seconds between two heartbeats of a node."""
NODES, MOST_S = 256, 2.0
"""With more nodes, they give heartbeats less often, but each 2 s: the store has one thread."""
NODES_THAT_SEE_ZERO = 16
"""With more nodes, they read the position of rank 0 less often."""
TAKE_OVER = 4
"""Intervals without a collector, after which the first rank of a node takes over; the next ones wait longer."""
PULSE_S = 2.0
"""A rank whose watch thread has not run for longer holds Python's lock, or is stopped."""
KILL_S = 7.0
"""Time after the message of the job, after which ranks that cannot end by themselves are killed. All others end 5 s
after it."""
PROCESS = 0
"""The priority of the process of a node: before its ranks, which have 1 and more."""
PROCESS_NAME = "titanlite-node"
"""As ps shows it."""
MOST_FILES = 2**20
END_POLL_S = 0.1
MOST_TEXT = 64
"""Characters of a name, such as a host's, that another program may have written into the store."""
MOST_PLACE = 256
"""Bytes of the position of rank 0. It goes into the pages, whose records have a fixed size."""
START_SHARE = 0.2
"""Of an interval, until all ranks of the node have come."""
LAST_BEAT_S = 1.0
_PR_SET_NAME = 15  # linux/prctl.h


def interval_s(nodes: int) -> float:
    """Seconds between two heartbeats of each of so many nodes."""
    return INTERVAL_S if nodes <= NODES else min(INTERVAL_S * nodes / NODES, MOST_S)


class Collector:
    """Collects the ranks of a node, unless one with a lower priority does.

    store: a connection that only `beat` uses. ranks: those that may be of this node. pages: of those that are known.
    nodes: their number, about. waits: intervals without another collector, after which this one begins.
    """

    def __init__(
        self, store: dist.Store, ranks: Iterable[int], pages: dict[int, Page], priority: int, nodes: int, waits: int
    ) -> None:
        self._store = store
        self._unknown = [rank for rank in ranks if rank not in pages]
        self.pages = dict(pages)
        self._priority = priority
        self._nodes = nodes
        self._waits_s = waits * interval_s(nodes)
        self._found_at = dict.fromkeys(pages, time.monotonic())
        self._host = socket.gethostname()
        self._number = self._beats = 0
        self._ranks: set[int] = set()  # whose place is known to the others
        self._orders: dict[str, Any] = {"first": "", "is_silent": False, "stacks": "", "zero": None, "answered": 0}
        self._orders["still"] = []  # up to two ranks that have begun training, and whose threads stand still
        self._seen_first: tuple[object, float] = (None, 0.0)  # the heartbeat of the rank that prints, and its time
        self._ended_at = math.inf
        self._collectives: dict[int, Any] = {}

    def beat(self, *, at_once: bool = False) -> None:
        """Give a heartbeat of each rank that no other one collects, and write into their pages what the store says.

        at_once: also of ranks that another one collects. Raises RuntimeError: the store is lost.
        """
        if not self._has_process():
            self.find()
        mine = [rank for rank in tuple(self.pages) if at_once or self._is_free(rank)]
        if not mine:
            return
        self._write_orders(mine)  # first: if the store is slow, no other one shall take over
        if self._number == 0:
            number = self._store.add("collectors", 1)
            self._store.set(f"collectives/{number}", "{}")
            self._number = number
        self._beats += 1
        rows = {rank: self._row(rank) for rank in mine}
        self._store.set(f"node/{self._number}", json.dumps({"beat": self._beats, "host": self._host, "ranks": rows}))
        for rank in set(mine) - self._ranks:
            self._store.set(f"where/{rank}", str(self._number))
            self._ranks.add(rank)
        if 0 in rows:
            self._store.set("zero", json.dumps([*rows[0][2:5], self._host]))
        self._ask(mine)
        self._orders["answered"] += 1
        said = {rank: Row(*row) for rank, row in rows.items()}
        self._orders["writer"] = min(mine, key=lambda rank: (said[rank].pulse_s > PULSE_S, said[rank].phases, rank))
        still = (rank for rank, row in said.items() if row.pulse_s > PULSE_S and row.step > 0 and not row.has_left)
        self._orders["still"] = [*islice(still, 2)]
        self._write_orders(mine)
        self._send_collectives(mine)

    def _has_process(self) -> bool:
        """Whether the process of the node collects the first of these ranks."""
        order: dict[str, Any] | None = next(iter(self.pages.values())).read("order")
        return self._priority != PROCESS and order is not None and order["by"] == PROCESS

    def find(self) -> None:
        """Open the pages of ranks that are not known yet. Raises RuntimeError."""
        for rank in [rank for rank in self._unknown if self._store.check([f"page/{rank}"])]:
            _, address = parse_value(self._store.get(f"page/{rank}"), parse_address) or ("", "")
            with suppress(OSError, ValueError):
                self.pages[rank] = Page.open(address)
                self._found_at[rank] = time.monotonic()
            self._unknown.remove(rank)

    @property
    def awaits(self) -> bool:
        """Whether ranks of this node have not come yet."""
        return bool(self._unknown)

    def living(self) -> list[int]:
        """The ranks whose processes have not ended."""
        return [rank for rank, page in tuple(self.pages.items()) if page.state() != "ended"]

    def end_ranks(self, in_s: float = 0.0) -> None:
        """The job ends, after so many seconds: `kill` may end ranks that cannot."""
        self._ended_at = min(self._ended_at, time.monotonic() + in_s)

    def kill(self) -> None:
        """Kill the ranks that hold Python's lock, or are stopped, KILL_S after the message of the job."""
        now = time.monotonic()
        if now - self._ended_at < KILL_S:
            return
        for page in tuple(self.pages.values()):
            pulse = page.read("pulse")
            is_blocked = pulse is not None and now - pulse[0] > PULSE_S
            if is_blocked and page.pid != os.getpid() and page.state() != "ended":
                with suppress(OSError):
                    os.kill(page.pid, signal.SIGKILL)

    def _is_free(self, rank: int) -> bool:
        """Whether this is the collector of a rank."""
        order = self.pages[rank].read("order")
        if order is None:  # never collected
            return time.monotonic() - self._found_at[rank] >= self._waits_s / TAKE_OVER
        if order["by"] != self._priority:
            self._ranks.discard(rank)
        return bool(order["by"] >= self._priority or time.monotonic() - order["at"] >= self._waits_s)

    def _row(self, rank: int) -> list[Any]:
        """[state, s since the last pulse, phases entered, step, phase, s in it, whether the rank has left]"""
        page, now = self.pages[rank], time.monotonic()
        count, step, phase, since = page.read("position") or (0, 0, "start-up", now)
        pulse, has_left = page.read("pulse") or (now, False)
        return [page.state(), round(now - pulse, 2), count, step, phase, round(now - since, 2), has_left]

    def _write_orders(self, ranks: Iterable[int]) -> None:
        self._orders |= {"by": self._priority, "at": time.monotonic()}
        for rank in ranks:
            self.pages[rank].write("order", self._orders)

    def _ask(self, mine: Iterable[int]) -> None:
        """Ask the store who has failed; waits for its answer."""
        orders, now = self._orders, time.monotonic()
        first = orders["first"] = election.first_failure(self._store)
        if first == election.PRINTED:
            self.end_ranks()
        elif first and int(first) in mine:  # another one may have collected it for a while, and not any more
            self._store.set(f"where/{first}", str(self._number))
        orders["is_silent"] = first not in ("", election.PRINTED) and self._is_silent(int(first))
        if first and not orders["stacks"] and self._store.check(["stacks"]):
            orders["stacks"] = self._store.get("stacks").decode(errors="replace")[:MOST_TEXT]
        period = max(1, self._nodes // NODES_THAT_SEE_ZERO)
        if (self._beats - 1) % period == 0 and (orders["zero"] or self._store.check(["zero"])):
            place = parse_value(self._store.get("zero"), parse_place)
            orders["zero"] = None if place is None else [*place, now]

    def said_of(self, rank: int) -> "tuple[int, Row] | None":
        """The number of the last heartbeat, and what it says of a rank; None if there is none. Raises RuntimeError."""
        if not self._store.check([f"where/{rank}"]):
            return None
        number = parse_value(self._store.get(f"where/{rank}"), int)
        if number is None or not self._store.check([f"node/{number}"]):
            return None
        node = parse_value(self._store.get(f"node/{number}"), parse_node)
        return None if node is None or rank not in node.ranks else (node.beat, node.ranks[rank])

    def _is_silent(self, rank: int) -> bool:
        """Whether the rank that is about to print has ended, or cannot print."""
        now = time.monotonic()
        if self._store.check([f"left/{rank}"]) or (said := self.said_of(rank)) is None:
            return False
        beat, row = said
        if row.state != "running" or row.pulse_s > SETTLE_S:
            return True
        if self._seen_first[0] != (rank, beat):
            self._seen_first = (rank, beat), now
        return now - self._seen_first[1] > max(SETTLE_S, 2 * interval_s(self._nodes))

    def _send_collectives(self, ranks: Iterable[int]) -> None:
        if not self._orders["stacks"]:
            return
        found = {rank: self.pages[rank].read("last") for rank in ranks}
        found = {rank: numbers for rank, numbers in found.items() if numbers is not None}
        if found != self._collectives:
            self._collectives = found
            self._store.set(f"collectives/{self._number}", json.dumps(found))


class Row(NamedTuple):
    """What a collector says of a rank. pulse_s: since its watch thread has run. phases: number of phases entered.
    phase_s: in the last one."""

    state: str
    pulse_s: float
    phases: int
    step: int
    phase: str
    phase_s: float
    has_left: bool


class Node(NamedTuple):
    """What a collector says of its ranks."""

    beat: int
    host: str
    ranks: dict[int, Row]


def parse_node(value: bytes) -> Node:
    content = json.loads(value)
    rows = {
        int(rank): Row(str(a), float(b), int(c), int(d), str(e)[:MOST_TEXT], float(f), bool(g))
        for rank, (a, b, c, d, e, f, g) in content["ranks"].items()
    }
    return Node(int(content["beat"]), str(content["host"])[:MOST_TEXT], rows)


def parse_address(value: bytes) -> tuple[str, str]:
    """(host, address of the page)"""
    host, address = json.loads(value)
    return str(host)[:MOST_TEXT], str(address)


def parse_place(value: bytes) -> tuple[int, int, str, str]:
    """The position of rank 0: (phases entered, step, phase, host)."""
    if len(value) > MOST_PLACE:
        raise ValueError("no position of a rank")
    count, step, phase, host = json.loads(value)
    return int(count), int(step), str(phase), str(host)


def start_process(
    store: dist.Store, ranks: Iterable[int], pages: dict[int, Page], nodes: int, silence_s: float
) -> None:
    """Fork the process that collects the ranks of this node, if the system can. It ends after all of them.

    silence_s: after the loss of the store, the time in which ranks end, or finish their work.
    """
    if sys.platform != "linux":
        return
    with warnings.catch_warnings(), suppress(OSError):
        warnings.simplefilter("ignore")  # that there are threads: the child uses nothing of theirs
        if os.fork() == 0:
            try:
                _run_process(store, ranks, pages, nodes, silence_s)
            finally:
                os._exit(0)


def _run_process(store: dist.Store, ranks: Iterable[int], pages: dict[int, Page], nodes: int, silence_s: float) -> None:
    gc.freeze()
    signal.set_wakeup_fd(-1)  # that of the rank
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, PROCESS_NAME.encode(), 0, 0, 0)
    empty = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # a reader of the output waits for its last writer
        os.dup2(empty, descriptor)
    os.closerange(3, MOST_FILES)
    os.chdir("/")
    own = store.clone()  # type: ignore[attr-defined]
    collector = Collector(own, ranks, pages, PROCESS, nodes, 0)
    ended = threading.Event()

    def give_beats() -> None:
        try:
            is_ending = False
            while not is_ending:
                collector.beat()
                is_ending = ended.wait(interval_s(nodes) * (START_SHARE if collector.awaits else 1))
            collector.beat()
        except RuntimeError:
            collector.end_ranks(silence_s)

    thread = threading.Thread(target=give_beats, daemon=True)
    thread.start()
    while collector.living():
        time.sleep(END_POLL_S)
        collector.kill()
    ended.set()
    thread.join(LAST_BEAT_S)
