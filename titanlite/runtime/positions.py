"""Positions of the ranks, for the message about a rank that ends or hangs without an error of its own."""

import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch.distributed as dist

INTERVAL_S = 0.5
"""Seconds between two signs of life of a process."""
SETTLE_S = 2.5
"""Wait before the verdict, in which a living process gives five signs of life and writes its stacks."""
MAX_READERS = 64
"""With more ranks, only the first of each node keeps a view of the others."""
FAULTS_FOLDER = "faults"


@dataclass
class Seen:
    """What this rank has seen of another rank. count: number of phases entered. changed_at, alive_at: time of the last
    change of the position and of the sign of life, by this rank's monotonic clock."""

    count: int = 0
    step: int = 0
    phase: str = "start-up"
    host: str = "an unknown host"
    changed_at: float = 0.0
    beats: int = 0
    alive_at: float = 0.0


class Positions:
    """The step and phase of each rank, shared through the store.

    The main thread writes its position when it enters a phase. A thread of each process writes signs of life: those of
    a process that is killed end, those of one whose main thread hangs do not. It also keeps a view of the other ranks,
    which survives the loss of the store, and writes the stacks of this process on request.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, local_rank: int, dump_folder: str) -> None:
        self._store = store
        self._rank = rank
        self.size = size
        self._folder = Path(dump_folder, FAULTS_FOLDER)
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
        """Describe the ranks that ended or lag, and the folder with the stacks of all others. Takes SETTLE_S."""
        folder = self._folder / f"{datetime.now():%Y%m%d-%H%M%S}"
        begin = time.monotonic()
        try:
            self._store.set("stacks", str(folder))
            while time.monotonic() < begin + SETTLE_S:
                self._read(self._store)
                time.sleep(INTERVAL_S / 5)
        except RuntimeError:
            self._lost = True
        with self._guard:
            text = describe(self._seen, self._rank, time.monotonic(), store_is_lost=self._lost)
        return text + (f"; Python stacks of all running ranks: {folder}" if folder.is_dir() else "")

    def _beat(self, store: dist.Store, reads: bool) -> None:
        """Run the thread, until the store is lost."""
        beats, dumped = 0, False
        with suppress(RuntimeError):
            while True:
                beats += 1
                store.set(f"alive/{self._rank}", str(beats))
                if reads:
                    self._read(store)
                if not dumped and store.check(["stacks"]):
                    dumped = True
                    self._write_stacks(Path(store.get("stacks").decode()))
                time.sleep(INTERVAL_S)

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
                    seen.beats, seen.alive_at = int(beats), now

    def _write_stacks(self, folder: Path) -> None:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"rank-{self._rank}.txt").open("w") as file:
                file.write(f"rank {self._rank} on {self._host}, process {os.getpid()}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)


def describe(seen: Mapping[int, Seen], own_rank: int, now: float, *, store_is_lost: bool) -> str:
    """Describe the ranks without a sign of life, or else those with the oldest position. seen: by rank."""
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
    if len(last) == len(seen):
        return f"all ranks are {where}: one of them hangs, or the network is lost"
    return f"{_names(last)} on {one.host} hangs or lags: {where}; the other ranks wait for it"


def _names(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
