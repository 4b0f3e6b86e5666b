"""Positions of the ranks, for the message about a rank that ends or hangs without an error of its own."""

import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch.distributed as dist

from titanlite.runtime.flight_recorder import last_numbers, ranks_behind, recorded_collectives

INTERVAL_S = 0.5
"""Seconds between two signs of life of a process."""
SETTLE_S = 2.5
"""Wait before the verdict, in which a running process gives five signs of life and writes its stacks."""
MAX_READERS = 64
"""With more ranks, only the first of each node keeps a view of the others."""
FAULTS_FOLDER = "faults"


@dataclass
class Seen:
    """What this rank has seen of another rank. count: number of phases entered. changed_at, alive_at: time of the last
    change of the position and of the sign of life, by this rank's monotonic clock. alive_beat: this rank's own beat at
    that time."""

    count: int = 0
    step: int = 0
    phase: str = "start-up"
    host: str = "an unknown host"
    changed_at: float = 0.0
    beats: int = 0
    alive_at: float = 0.0
    alive_beat: int = 0


class Positions:
    """The step and phase of each rank, shared through the store.

    The main thread writes its position when it enters a phase. A thread of each process writes signs of life: those of
    a process that is killed end, those of one whose main thread hangs do not. It also keeps a view of the other ranks,
    which survives the loss of the store, and on request writes the stacks and the last collectives of this process.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        local_rank: int,
        dump_folder: str | None,
        silence_s: float,
        on_silence: Callable[[], None],
    ) -> None:
        """
        dump_folder: None: no stacks are written. on_silence: called once, in a thread of its own, if another rank has
        begun training and given no sign of life for `silence_s`: the main thread may wait for it with a longer timeout.
        """
        self._store = store
        self._rank = rank
        self.size = size
        self._folder = None if dump_folder is None else Path(dump_folder, FAULTS_FOLDER)
        self._silent_beats = silence_s / INTERVAL_S
        self._on_silence = on_silence
        self._beats = 0
        self._host = socket.gethostname()
        self._count = 0
        self._lost = False
        self._seen = {other: Seen(changed_at=time.monotonic(), alive_at=time.monotonic()) for other in range(size)}
        self._guard = threading.Lock()
        self.enter(0, "start-up")
        if size > 1:
            reads = size <= MAX_READERS or local_rank == 0
            threading.Thread(target=self._beat, args=(store.clone(), reads), name="positions", daemon=True).start()  # type: ignore[attr-defined]

    def enter(self, step: int, phase: str) -> None:
        """Note that the main thread enters a phase; takes microseconds."""
        if self.size == 1 or self._lost:
            return
        self._count += 1
        try:
            self._store.set(f"position/{self._rank}", json.dumps([self._count, step, phase, self._host]))
        except RuntimeError:  # the next collective fails, too
            self._lost = True

    def explain(self) -> str:
        """Describe the ranks that ended or lag, and name the folder with the stacks and last collectives of all living
        ranks. Takes SETTLE_S."""
        folder = None if self._folder is None else self._folder / f"{datetime.now():%Y%m%d-%H%M%S}"
        begin = time.monotonic()
        behind: list[int] = []
        try:
            self._store.set("stacks", "" if folder is None else str(folder))
            while time.monotonic() < begin + SETTLE_S:
                self._read(self._store)
                time.sleep(INTERVAL_S / 5)
            behind = self._ranks_behind()
        except RuntimeError:
            self._lost = True
        with self._guard:
            text = describe(self._seen, self._rank, time.monotonic(), behind, store_is_lost=self._lost)
        is_written = folder is not None and folder.is_dir()
        return text + (f"; stacks and last collectives of all running ranks: {folder}" if is_written else "")

    def _ranks_behind(self) -> list[int]:
        """The ranks that others wait for in a collective, among those that have sent their last numbers."""
        keys = {rank: f"collectives/{rank}" for rank in range(self.size)}
        keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return ranks_behind({rank: json.loads(self._store.get(key)) for rank, key in keys.items()})

    def _beat(self, store: dist.Store, reads: bool) -> None:
        """Run the thread, until the store is lost."""
        dumped = called = False
        with suppress(RuntimeError):
            while True:
                self._beats += 1
                store.set(f"alive/{self._rank}", str(self._beats))
                if reads:
                    self._read(store)
                if not called and self._any_is_silent():
                    called = True
                    threading.Thread(target=self._on_silence, name="silence", daemon=True).start()
                if not dumped and store.check(["stacks"]):
                    dumped = True
                    recorded = recorded_collectives()
                    store.set(f"collectives/{self._rank}", json.dumps(last_numbers(recorded)))
                    folder = store.get("stacks").decode()
                    if folder:
                        self._write(Path(folder), recorded)
                time.sleep(INTERVAL_S)

    def _any_is_silent(self) -> bool:
        """Whether a rank is silent, counted in beats of this process: a pause of all ranks does not count."""
        return any(
            each.step > 0 and self._beats - each.alive_beat > self._silent_beats
            for rank, each in self._seen.items()
            if rank != self._rank
        )

    def _read(self, store: dist.Store) -> None:
        """Update the view by two requests; does nothing until all ranks have written."""
        now = time.monotonic()
        keys = [f"{kind}/{other}" for kind in ("position", "alive") for other in range(self.size)]
        if not store.check(keys):
            return
        values = store.multi_get(keys)
        with self._guard:
            for other, (position, beats) in enumerate(zip(values[: self.size], values[self.size :], strict=True)):
                seen = self._seen[other]
                count, *where = json.loads(position)
                if count != seen.count:
                    seen.count, (seen.step, seen.phase, seen.host), seen.changed_at = count, where, now
                if int(beats) != seen.beats:
                    seen.beats, seen.alive_at, seen.alive_beat = int(beats), now, self._beats

    def _write(self, folder: Path, recorded: Mapping[str, str]) -> None:
        """Write the stacks of this process and its recorded collectives, by backend, into the folder."""
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"rank-{self._rank}.txt").open("w") as file:
                file.write(f"rank {self._rank} on {self._host}, process {os.getpid()}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            for backend, text in recorded.items():
                (folder / f"rank-{self._rank}.{backend}.json").write_text(text)


def describe(
    seen: Mapping[int, Seen], own_rank: int, now: float, behind: Sequence[int] = (), *, store_is_lost: bool
) -> str:
    """Describe the ranks without a sign of life, or else those with the oldest position, or else those `behind`.

    seen: by rank. behind: see ranks_behind.
    """
    if store_is_lost:
        one = seen[0]
        return (
            "the launcher or rank 0 has ended, and the store of the ranks with it; rank 0 was last seen in step "
            f"{one.step} ({one.phase}) on {one.host}"
        )
    others = {rank: each for rank, each in seen.items() if rank != own_rank}
    ended = [rank for rank, each in others.items() if now - each.alive_at > 4 * INTERVAL_S]
    if ended:
        one = seen[ended[0]]
        return (
            f"{_names(ended)} on {one.host}: no sign of life, in step {one.step} ({one.phase}): killed, out of memory, "
            "stopped, or its node is lost"
        )
    oldest = min(each.count for each in seen.values())
    last = [rank for rank, each in seen.items() if each.count == oldest]
    one = seen[last[0]]
    where = f"in step {one.step} ({one.phase}) for {now - one.changed_at:.0f} s"
    if len(last) == len(seen) and behind:
        first = seen[behind[0]]
        return f"{_names(behind)} on {first.host} hangs or lags: {where}; the other ranks wait for it in a collective"
    if len(last) == len(seen):
        return f"all ranks are {where}: one of them hangs, or the network is lost"
    return f"{_names(last)} on {one.host} hangs or lags: {where}; the other ranks wait for it"


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
