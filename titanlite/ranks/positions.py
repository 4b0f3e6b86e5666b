"""Positions of the ranks, for the message about a rank that ends or hangs without an error of its own."""

import faulthandler
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titanlite.ranks.collector import INTERVAL_S, PROCESS, PULSE_S, TAKE_OVER, Collector, interval_s, start_process
from titanlite.ranks.distributed import NCCL_AFTER_S
from titanlite.ranks.message import (
    SILENT_S,
    describe_loss,
    describe_ranks,
    last_numbers,
    ranks_behind,
    timeout_of_waiting,
)
from titanlite.ranks.page import Page
from titanlite.ranks.signals import TICK_S, in_thread, watch
from titanlite.ranks.view import View
from titanlite.runtime.errors import LateRanksError
from titanlite.runtime.files import no_link
from titanlite.runtime.logging import log
from titanlite.runtime.torch_internals import numbers_of_collectives, recorded_collectives
from titanlite.runtime.waiting import AGAIN_S, ANSWER_S, FIRST_S, SETTLE_S, call_within, parse_value, waiting

POLL_S = 0.1
"""Seconds between two looks of a rank at what its collector orders."""
LOOK_S = 5.0
"""Age of a phase from which on its collectives on the device are looked at, and seconds between two looks."""
MAX_FILES = 64
"""With more ranks, one rank of each node writes its stacks: of those that run, one with the oldest position."""
MOST_LATE = 64
"""Late ranks that an error lists."""
ALL_LEFT = "all left"
"""Key in the store: all ranks end by themselves."""
FAULTS_FOLDER = "faults"
STACKS_NAME = "%Y%m%d-%H%M%S"
"""Of a folder in FAULTS_FOLDER: when its stacks were asked for."""
FINISHED = "finished"
"""The last phase, in which a rank waits for the others; see waiting."""


class Positions:
    """The step and phase of each rank, shared by the collectors of the nodes (collector.py).

    The main thread writes its position into the page of this rank when it enters a phase, and the watch thread a pulse:
    that of a process that is killed ends, that of one whose main thread hangs does not. A further thread does what the
    collector orders: it writes the stacks and the last collectives of this process on request, and ends the process
    after the message of another rank. It collects if no process does. On the first and on the last rank, it also keeps
    a view of all ranks. The watch thread checks it: a call to a store whose process is stopped blocks without limit.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        local_ranks: range,
        dump_folder: str | None,
        silence_s: float,
        on_silence: Callable[[], None],
    ) -> None:
        """
        local_ranks: those of this node. dump_folder: None: no stacks are written. on_silence: called in a thread of its
        own, if for `silence_s` the store has not answered, or another rank that has begun training has given no
        heartbeat: the main thread may wait for it with a longer timeout; also after the timeout of a collective of
        NCCL, in which no thread of Python waits.
        """
        self._store = store
        self.background: dist.Store = store.clone() if size > 1 else store  # type: ignore[attr-defined]
        """Another connection, for requests that are answered at once: the main thread may wait in the first one, which
        blocks other threads."""
        self._rank = rank
        self.local_ranks = local_ranks
        self.size = size
        self._folder = None if dump_folder is None else Path(dump_folder, FAULTS_FOLDER)
        self.silence_s = silence_s
        self._on_silence = on_silence
        self.on_beat: Callable[[], None] = lambda: None
        """Called at least once per heartbeat, by a thread."""
        self._ticks = self._still_since = 0  # since when another rank of this node stands still
        self._answered: tuple[object, int] = (None, 0)  # the last answer of the store, and the tick
        self._log_after_s = FIRST_S
        self._count, self._entered_at = 0, 0.0
        self._looked_at = 0.0
        self._numbers = "", 0.0  # what the last look at collectives has found, and since when
        self._lost = self._has_left = False
        self._order: dict[str, Any] = {}
        self._guard = threading.Lock()  # of the collector and the view
        self._leaving = threading.Lock()
        if size == 1:
            return
        nodes = -(-size // len(local_ranks))
        self._interval_s = interval_s(nodes)
        if rank == 0 and self._interval_s > INTERVAL_S and silence_s < self._silent_s:
            log.warning(
                "comm.train_timeout_s = %g is short for %d nodes, which give heartbeats every %.1f s: a rank that runs "
                "may be taken for one that has ended; set at least %.0f",
                *(silence_s, nodes, self._interval_s, math.ceil(self._silent_s)),
            )
        self._page = Page.create()
        self._view = View(self.background, size)
        self._reads = rank in (0, size - 1)
        self.enter(0, "start-up")
        self._tick()
        store.set(f"page/{rank}", json.dumps([socket.gethostname(), self._page.address]))
        place = rank - local_ranks.start + 1
        self._collector = Collector(
            self.background, local_ranks, {rank: self._page}, place, nodes, waits=place * TAKE_OVER
        )
        threading.Thread(target=self._run, name="titanlite-store", daemon=True).start()
        watch().checks.append(self._tick)

    def start_process(self) -> None:
        """On the first rank of a node, fork the process that collects its ranks. Before there are other threads that
        hold locks, and before the device is used."""
        if self.size > 1 and self._rank == self.local_ranks.start:
            nodes = -(-self.size // len(self.local_ranks))
            start_process(self.background, self.local_ranks, {self._rank: self._page}, nodes, self.silence_s)

    def enter(self, step: int, phase: str) -> None:
        """Note that the main thread enters a phase; takes microseconds."""
        if self.size > 1:
            self._count, self._entered_at = self._count + 1, time.monotonic()
            self._page.write("position", [self._count, step, phase, self._entered_at])

    def finish(self, step: int) -> None:
        """Wait until all ranks have finished or failed: one that hangs is named by the others. Raises LateRanksError
        after `silence_s`."""
        if self.size == 1:
            return
        self.enter(step, FINISHED)
        with suppress(dist.DistNetworkError):  # rank 0, which may host the store, has finished, and seen that all have
            self.leave()
            try:
                with waiting(lambda: f"the end of all {self.size} ranks, in step {step}: see their logs"):
                    self._store.wait([ALL_LEFT], timedelta(seconds=self.silence_s))
            except dist.DistStoreError:
                raise self._late() from None

    def _late(self) -> LateRanksError:
        """The ranks that have not left. Raises RuntimeError."""

        def look() -> list[int]:
            with self._guard:
                return self._view.late()

        return late_error(self.background, self._rank, self.size, self.silence_s, look)

    def leave(self) -> None:
        """Tell the other ranks that this one ends by itself. Raises RuntimeError."""
        with self._leaving:
            has_left, self._has_left = self._has_left, True
            if has_left or self.size == 1:
                return
            self._page.write("pulse", [time.monotonic(), True])
        note_left(self.background, self._rank, self.size)

    def is_needed(self) -> bool:
        """Whether another rank that has not called `leave` gives heartbeats, or starts. For rank 0. Raises
        RuntimeError."""
        if self.size == 1:
            return False
        with self._guard:
            now = time.monotonic()
            others = [
                (rank, each) for rank, each in self._view.seen.items() if rank != self._rank and not each.has_left
            ]
            living = [
                rank for rank, each in others if each.beats == 0 or not each.is_lost(now, max(SETTLE_S, self._silent_s))
            ]
        return any(not self.background.check([f"left/{rank}"]) for rank in living)

    @property
    def first_failure(self) -> str:
        """What the collector has read last: the rank that prints, or election.PRINTED; "" if no rank has failed."""
        return str(self._order.get("first", ""))

    @property
    def is_first_silent(self) -> bool:
        """Whether the rank that prints has ended before, or is blocked."""
        return bool(self._order.get("is_silent"))

    def silent(self, within_s: float) -> list[int]:
        """Return those of the other ranks of this node that give no heartbeat within `within_s`, as soon as the others
        have given one. Ranks that end by themselves are never silent. Raises RuntimeError."""

        def sign(rank: int) -> object:
            """Changes while the rank runs; None: there is none."""
            if (page := self._collector.pages.get(rank)) is not None:
                return page.read("pulse")
            said = self._collector.said_of(rank)
            return said[0] if said is not None and said[1].state == "running" and said[1].pulse_s <= PULSE_S else None

        def wait() -> list[int]:
            with self._guard:
                self._collector.find()  # those that run
            waiting = {rank: sign(rank) for rank in self.local_ranks if rank != self._rank}
            end = time.monotonic() + within_s
            while waiting and time.monotonic() < end:
                time.sleep(POLL_S)
                waiting = {
                    rank: before
                    for rank, before in waiting.items()
                    if sign(rank) in (before, None) and not self.background.check([f"left/{rank}"])
                }
            return list(waiting)

        return call_within(within_s + ANSWER_S, wait)

    def explain(self, behind: Sequence[int] = ()) -> str:
        """Describe the ranks that ended or lag, and name the folder with the stacks and last collectives of living
        ranks. Takes SETTLE_S, or ANSWER_S if the store does not answer.

        behind: ranks that others wait for, if known; else the last collectives tell.
        """
        folder = None if self._folder is None else self._folder / f"{datetime.now():{STACKS_NAME}}"
        settle_s = max(SETTLE_S, 2 * self._interval_s + POLL_S)
        try:
            # Another rank may have asked for stacks before, and been killed.
            own = "" if folder is None else folder.name
            folder = self._stacks_folder(call_within(ANSWER_S, lambda: self.background.compare_set("stacks", "", own)))
            last = call_within(settle_s + ANSWER_S, lambda: self._settle(settle_s))
            behind = behind or ranks_behind(last)
        except RuntimeError:
            self._lost = True
            if folder is not None:
                self._write(folder, recorded_collectives())
        now = time.monotonic()
        if self._lost:
            text = describe_loss(self._order.get("zero"), now)
        else:
            with self._guard:
                text = describe_ranks(self._view.seen, self._rank, now, behind, silent_s=self._silent_s)
        is_written = folder is not None and folder.is_dir()
        which = "all running ranks" if self.size <= MAX_FILES else "a running rank of each node"
        return text + (f"; stacks and last collectives of {which}: {folder}" if is_written else "")

    @property
    def _silent_s(self) -> float:
        """A rank without a heartbeat for longer has ended: four intervals, as a reader is late by up to one."""
        return max(SILENT_S, 4 * self._interval_s)

    def _settle(self, settle_s: float) -> dict[int, dict[str, int]]:
        """Update the view for so long, while ranks write their stacks; returns the last collectives by rank."""
        end = time.monotonic() + settle_s
        while True:
            is_last = time.monotonic() >= end
            if self._order.get("by") != PROCESS:  # the rank that has collected may be the one that has ended
                with self._guard:
                    self._collector.beat(at_once=True)
            with self._guard:
                self._view.read(self._ticks)
            if is_last:
                self._view.find_hosts()
                return self._view.collectives()
            time.sleep(POLL_S if self.size <= MAX_FILES else self._interval_s)

    def _stacks_folder(self, value: bytes) -> Path | None:
        """The folder for stacks, whose name is the value; None if there is no dump folder."""
        name = parse_value(value, lambda text: f"{datetime.strptime(text.decode(), STACKS_NAME):{STACKS_NAME}}")
        return None if self._folder is None or name is None else self._folder / name

    def _run(self) -> None:
        """Run the thread that follows the collector, until the store is lost."""
        beat_at, dumped = 0.0, False
        with suppress(RuntimeError):
            while True:
                self._order = self._page.read("order") or self._order
                self.on_beat()
                if self._order.get("stacks") and not dumped:
                    dumped = True
                    self._show_stacks()
                now = time.monotonic()
                self._look_at_collectives(now)
                if now >= beat_at:
                    beat_at = now + self._interval_s
                    with self._guard:
                        self._collector.beat()
                        self._collector.kill()
                    if self._reads:
                        with self._guard:
                            self._view.read(self._ticks)
                            awaits = any(each.beats == 0 for each in self._view.seen.values())
                        beat_at = now if awaits and self.size <= MAX_FILES else beat_at
                    if self._rank == 0:
                        self._log_wait()
                time.sleep(POLL_S)

    def _look_at_collectives(self, now: float) -> None:
        """End the process once a collective of NCCL waits for as long as its timeout, and none has begun or ended. NCCL
        would end it NCCL_AFTER_S later, and without a word about the rank that hangs."""
        if now - max(self._looked_at, self._entered_at) < LOOK_S:
            return
        self._looked_at = now
        numbers, (before, since) = numbers_of_collectives(), self._numbers
        if numbers != before:
            self._numbers = numbers, now
        elif numbers and now - since > self.silence_s:  # before, no timeout can have passed, and a question may block
            timeout_s = parse_value(recorded_collectives()["nccl"].encode(), timeout_of_waiting)
            if timeout_s is not None and now - since > timeout_s - NCCL_AFTER_S:
                self._numbers = numbers, now
                in_thread(self._on_silence)

    def _show_stacks(self) -> None:
        """Write the last collectives for the message and, of one rank per node if there are many, the files."""
        recorded = recorded_collectives()
        self._page.write("last", last_numbers(recorded))
        folder = self._stacks_folder(self._order["stacks"].encode())
        if folder is not None and (self.size <= MAX_FILES or self._order.get("writer") == self._rank):
            self._write(folder, recorded)

    def _tick(self) -> None:
        """Write the pulse, and notice silence, counted in ticks of the watch thread: a pause of all ranks does not
        count."""
        with self._leaving:  # else a pulse from before could undo that of `leave`
            self._page.write("pulse", [time.monotonic(), self._has_left])
        self._ticks += 1
        order = self._page.read("order")
        if order is not None and (order["by"], order["answered"]) != self._answered[0]:
            self._answered = (order["by"], order["answered"]), self._ticks
        is_still = order is not None and any(rank != self._rank for rank in order["still"])
        self._still_since = self._still_since if is_still else self._ticks
        others = [each for rank, each in self._view.seen.items() if rank != self._rank] if self._reads else []
        begun = [each.alive_tick for each in others if each.step > 0]
        if self._ticks - min([self._answered[1], self._still_since, *begun]) > self.silence_s / TICK_S:
            watch().checks.remove(self._tick)
            in_thread(self._on_silence)

    def _log_wait(self) -> None:
        """Log, after FIRST_S and then each AGAIN_S, for which ranks the others wait. They may all be in one phase, of
        which a step of a large model takes minutes: then only a rank without heartbeat is certain."""
        now = time.monotonic()
        with self._guard:
            seen = self._view.seen
            waited_s = now - max(each.changed_at for each in seen.values())
            differ = len({each.count for each in seen.values()}) > 1
            silent = any(each.step > 0 and now - each.alive_at > FIRST_S for each in seen.values())
            if waited_s < FIRST_S:
                self._log_after_s = FIRST_S
            if waited_s <= self._log_after_s or not (differ or silent) or seen[self._rank].phase == FINISHED:
                return
            text = describe_ranks(seen, self._rank, now, silent_s=self._silent_s)
        self._log_after_s = waited_s + AGAIN_S
        log.warning("waiting for %.0f s: %s", waited_s, text)

    def _write(self, folder: Path, recorded: Mapping[str, str]) -> None:
        """Write the stacks of this process and its recorded collectives, by backend, into the folder."""
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if folder.is_symlink():  # before rank 0 has renamed links
                return
            with open(folder / f"rank-{self._rank}.txt", "w", opener=no_link) as file:
                file.write(f"rank {self._rank} on {socket.gethostname()}, process {os.getpid()}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            for backend, text in recorded.items():
                with open(folder / f"rank-{self._rank}.{backend}.json", "w", opener=no_link) as file:
                    file.write(text)


def note_left(store: dist.Store, rank: int, size: int) -> None:
    """Note that a rank ends by itself; the last one sets the key for which all of them wait."""
    store.set(f"left/{rank}", "")
    if store.add("left", 1) == size:
        store.set(ALL_LEFT, "")


def late_error(
    store: dist.Store, rank: int, size: int, waited_s: float, look: Callable[[], list[int]]
) -> LateRanksError:
    """The error of all ranks that have waited in vain. One of them looks for the late ranks, with a request for each
    rank, and tells the others. The error names rank 0 if it finds none, or does not tell.

    store: for this use only. Raises RuntimeError.
    """
    found: list[int] | None = None
    if store.compare_set("late/by", "", str(rank)) == str(rank).encode():
        late = look()
        found = [len(late), *late[:MOST_LATE]]
        store.set("late", json.dumps(found))
    else:
        with suppress(dist.DistStoreError):
            store.wait(["late"], timedelta(seconds=ANSWER_S))
            found = parse_value(store.get("late"), lambda value: [*map(int, json.loads(value))])
    number, *late = found or [0]
    ranks = [each for each in late if 0 <= each < size][:MOST_LATE]
    return LateRanksError(ranks, waited_s, min(number, size)) if ranks else LateRanksError([0], waited_s)
