"""Positions of the ranks, for the message about a rank that ends or hangs without an error of its own."""

import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

import torch.distributed as dist

from titanlite.ranks.message import Seen, describe_ranks, last_numbers, ranks_behind
from titanlite.ranks.signals import TICK_S, in_thread, watch
from titanlite.runtime.errors import LateRanksError
from titanlite.runtime.files import no_link
from titanlite.runtime.logging import log
from titanlite.runtime.torch_internals import recorded_collectives
from titanlite.runtime.waiting import AGAIN_S, ANSWER_S, FIRST_S, SETTLE_S, call_within, parse_value, waiting

INTERVAL_S = 0.5
"""Seconds between two heartbeats of a process."""
MAX_READERS = 64
"""With more ranks, only the first of each node keeps a view of the others."""
FAULTS_FOLDER = "faults"
STACKS_NAME = "%Y%m%d-%H%M%S"
"""Of a folder in FAULTS_FOLDER: when its stacks were asked for."""
FINISHED = "finished"
"""The last phase, in which a rank waits for the others; see waiting."""


class Positions:
    """The step and phase of each rank, shared through the store.

    The main thread writes its position when it enters a phase. A thread of each process writes heartbeats: those of
    a process that is killed end, those of one whose main thread hangs do not. It also keeps a view of the other ranks,
    which survives the loss of the store, and on request writes the stacks and the last collectives of this process.
    The watch thread checks the view: a call to a store whose process is stopped blocks without limit.
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
        local_ranks: those of this node. dump_folder: None: no stacks are written. on_silence: called once, in a thread
        of its own, if for `silence_s` the store has not answered, or another rank that has begun training has given no
        heartbeat: the main thread may wait for it with a longer timeout.
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
        """Called after each heartbeat, in the thread that uses the store. May raise RuntimeError: the store is lost."""
        self._ticks = 0
        self._answered_tick = 0
        self._log_after_s = FIRST_S
        self._host = socket.gethostname()
        self._count = 0
        self._lost = False
        self._seen = {other: Seen(changed_at=time.monotonic(), alive_at=time.monotonic()) for other in range(size)}
        self._guard = threading.Lock()
        self.enter(0, "start-up")
        if size > 1:
            store.set(f"alive/{rank}", "0")  # the others read nothing before all ranks have written
            reads = size <= MAX_READERS or rank == local_ranks.start
            threading.Thread(target=self._beat, args=(reads,), name="titanlite-store", daemon=True).start()
            watch().checks.append(self._check_silence)

    def enter(self, step: int, phase: str) -> None:
        """Note that the main thread enters a phase; takes microseconds."""
        if self.size == 1 or self._lost:
            return
        self._count += 1
        try:
            self._store.set(f"position/{self._rank}", json.dumps([self._count, step, phase, self._host]))
        except RuntimeError:  # the next collective fails, too
            self._lost = True

    def finish(self, step: int) -> None:
        """Wait until all ranks have finished or failed: one that hangs is named by the others. Raises LateRanksError
        after `silence_s`."""
        if self.size == 1:
            return
        self.enter(step, FINISHED)
        keys = [f"finished/{rank}" for rank in range(self.size)]
        with suppress(dist.DistNetworkError):  # rank 0, which may host the store, has finished, and seen that all have
            self.leave()
            try:
                with waiting(lambda: f"the end of all {self.size} ranks, in step {step}: see their logs"):
                    self._store.wait(keys, timedelta(seconds=self.silence_s))
            except dist.DistStoreError:
                late = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise LateRanksError(late or [0], self.silence_s) from None

    def leave(self) -> None:
        """Tell the other ranks that this one ends by itself. Raises RuntimeError."""
        self.background.set(f"finished/{self._rank}", "")

    def is_needed(self) -> bool:
        """Whether another rank that has not called `leave` gives heartbeats, or starts. Raises RuntimeError."""
        with self._guard:
            now = time.monotonic()
            others = [(rank, each) for rank, each in self._seen.items() if rank != self._rank]
            living = [rank for rank, each in others if each.beats == 0 or now - each.alive_at <= SETTLE_S]
        return any(not self.background.check([f"finished/{rank}"]) for rank in living)

    def silent(self, ranks: Iterable[int], within_s: float) -> list[int]:
        """Return those of `ranks` that give no heartbeat within `within_s`, as soon as the others have given one.

        This rank, and ranks that end by themselves, are never silent. Raises RuntimeError.
        """

        def wait() -> list[int]:
            waiting = {rank: self._beats(rank) for rank in ranks if rank != self._rank}
            end = time.monotonic() + within_s
            while waiting and time.monotonic() < end:
                time.sleep(INTERVAL_S / 5)
                waiting = {
                    rank: beats
                    for rank, beats in waiting.items()
                    if self._beats(rank) == beats and not self.background.check([f"finished/{rank}"])
                }
            return list(waiting)

        return call_within(within_s + ANSWER_S, wait)

    def _beats(self, rank: int) -> bytes:
        """The number of heartbeats; b"" before the first one."""
        key = f"alive/{rank}"
        return self.background.get(key) if self.background.check([key]) else b""

    def explain(self, behind: Sequence[int] = ()) -> str:
        """Describe the ranks that ended or lag, and name the folder with the stacks and last collectives of all living
        ranks. Takes SETTLE_S, or ANSWER_S if the store does not answer.

        behind: ranks that others wait for, if known; else the last collectives tell.
        """
        folder = None if self._folder is None else self._folder / f"{datetime.now():{STACKS_NAME}}"
        try:
            # Another rank may have asked for stacks before, and been killed.
            own = "" if folder is None else folder.name
            folder = self._stacks_folder(call_within(ANSWER_S, lambda: self.background.compare_set("stacks", "", own)))
            last = call_within(SETTLE_S + ANSWER_S, self._settle)
            behind = behind or ranks_behind(last)
        except RuntimeError:
            self._lost = True
            if folder is not None:
                self._write(folder, recorded_collectives())
        with self._guard:
            text = describe_ranks(self._seen, self._rank, time.monotonic(), behind, store_is_lost=self._lost)
        is_written = folder is not None and folder.is_dir()
        return text + (f"; stacks and last collectives of all running ranks: {folder}" if is_written else "")

    def _settle(self) -> dict[int, dict[str, int]]:
        """Update the view for SETTLE_S, while all ranks write their stacks; returns the last collectives by rank."""
        begin = time.monotonic()
        store = self.background
        while time.monotonic() < begin + SETTLE_S:
            self._read()
            time.sleep(INTERVAL_S / 5)
        keys = {rank: f"collectives/{rank}" for rank in range(self.size)}
        values = {rank: store.get(key) for rank, key in keys.items() if store.check([key])}
        found = {rank: parse_value(value, _parse_numbers) for rank, value in values.items()}
        return {rank: numbers for rank, numbers in found.items() if numbers is not None}

    def _stacks_folder(self, value: bytes) -> Path | None:
        """The folder for stacks, whose name is the value; None if there is no dump folder."""
        name = parse_value(value, lambda text: f"{datetime.strptime(text.decode(), STACKS_NAME):{STACKS_NAME}}")
        return None if self._folder is None or name is None else self._folder / name

    def _beat(self, reads: bool) -> None:
        """Run the thread that uses the store, until the store is lost."""
        store, beats, dumped = self.background, 0, False
        with suppress(RuntimeError):
            while True:
                beats += 1
                store.set(f"alive/{self._rank}", str(beats))
                self.on_beat()
                awaits_others = reads and not self._read()
                if self._rank == 0:
                    self._log_wait()
                if not dumped and store.check(["stacks"]):
                    dumped = True
                    recorded = recorded_collectives()
                    store.set(f"collectives/{self._rank}", json.dumps(last_numbers(recorded)))
                    folder = self._stacks_folder(store.get("stacks"))
                    if folder is not None:
                        self._write(folder, recorded)
                self._answered_tick = self._ticks
                time.sleep(INTERVAL_S / 5 if awaits_others else INTERVAL_S)

    def _check_silence(self) -> None:
        """Notice silence, counted in ticks of the watch thread: a pause of all ranks does not count."""
        self._ticks += 1
        begun = [each.alive_tick for rank, each in self._seen.items() if rank != self._rank and each.step > 0]
        if self._ticks - min([self._answered_tick, *begun]) > self.silence_s / TICK_S:
            watch().checks.remove(self._check_silence)
            in_thread(self._on_silence)

    def _log_wait(self) -> None:
        """Log, after FIRST_S and then each AGAIN_S, for which ranks the others wait. They may all be in one phase, of
        which a step of a large model takes minutes: then only a rank without heartbeat is certain."""
        now = time.monotonic()
        with self._guard:
            waited_s = now - max(each.changed_at for each in self._seen.values())
            differ = len({each.count for each in self._seen.values()}) > 1
            silent = any(each.step > 0 and now - each.alive_at > FIRST_S for each in self._seen.values())
            text = describe_ranks(self._seen, self._rank, now, store_is_lost=False)
        if waited_s < FIRST_S:
            self._log_after_s = FIRST_S
        elif waited_s > self._log_after_s and (differ or silent) and self._seen[self._rank].phase != FINISHED:
            self._log_after_s = waited_s + AGAIN_S
            log.warning("waiting for %.0f s: %s", waited_s, text)

    def _read(self) -> bool:
        """Update the view by two requests; does nothing and returns False until all ranks have written."""
        now = time.monotonic()
        keys = [f"{kind}/{other}" for kind in ("position", "alive") for other in range(self.size)]
        if not self.background.check(keys):
            return False
        values = self.background.multi_get(keys)
        with self._guard:
            for other, (position, beats) in enumerate(zip(values[: self.size], values[self.size :], strict=True)):
                seen = self._seen[other]
                place, count = parse_value(position, _parse_position), parse_value(beats, int)
                if place is not None and place[0] != seen.count:
                    seen.count, seen.step, seen.phase, seen.host = place
                    seen.changed_at = now
                if count is not None and count != seen.beats:
                    seen.beats, seen.alive_at, seen.alive_tick = count, now, self._ticks
        return True

    def _write(self, folder: Path, recorded: Mapping[str, str]) -> None:
        """Write the stacks of this process and its recorded collectives, by backend, into the folder."""
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if folder.is_symlink():  # before rank 0 has renamed links
                return
            with open(folder / f"rank-{self._rank}.txt", "w", opener=no_link) as file:
                file.write(f"rank {self._rank} on {self._host}, process {os.getpid()}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            for backend, text in recorded.items():
                with open(folder / f"rank-{self._rank}.{backend}.json", "w", opener=no_link) as file:
                    file.write(text)


def _parse_position(value: bytes) -> tuple[int, int, str, str]:
    count, step, phase, host = json.loads(value)
    return int(count), int(step), str(phase), str(host)


def _parse_numbers(value: bytes) -> dict[str, int]:
    return {group: int(number) for group, number in json.loads(value).items()}
