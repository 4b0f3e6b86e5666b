"""Heartbeats, the explanation of a hang and the end of a run, of up to 16,384 simulated ranks, 8 per node.

The functions are those of a run: a Collector per node, two Views. `of_heartbeats` uses a store in memory, and counts
what a client sends. `store_seconds` uses a TCPStore in a process of its own, with a connection per node, and measures
the CPU time of its only thread.
"""

import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from benchmarks.growth.count import Count
from titanlite.ranks.collector import PROCESS, Collector, interval_s
from titanlite.ranks.page import SIZE, Page
from titanlite.ranks.positions import note_left
from titanlite.ranks.view import View

PER_NODE = 8
HOST_LENGTH = 30
"""Characters of the name of a host."""
PHASE = "forward, backward and update"
SERVER = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
THREADS = 4
OVERHEAD = 17
"""Bytes of a request beside its keys and values: command, lengths."""


class CountingStore:
    """A store that counts the requests of its clients, their keys, and the bytes of both directions."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.totals = {"requests": 0, "keys": 0, "bytes": 0}
        self._guard = threading.Lock()

    def _count(self, keys: Sequence[str], other_bytes: int = 0, requests: int = 1) -> None:
        with self._guard:
            self.totals["requests"] += requests
            self.totals["keys"] += requests * len(keys)
            self.totals["bytes"] += requests * sum(len(key) + OVERHEAD for key in keys) + other_bytes

    def set(self, key: str, value: str) -> None:
        self._count([key], len(value))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        self._count([key], len(value), requests=2)  # the client waits for the key first
        return value

    def check(self, keys: list[str]) -> bool:
        self._count(keys)
        return self._store.check(keys)

    def add(self, key: str, number: int) -> int:
        self._count([key])
        return self._store.add(key, number)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._store.multi_get(keys)
        self._count(keys, sum(map(len, values)), requests=2)
        return values

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._count([key], len(expected) + len(desired))
        return self._store.compare_set(key, expected, desired)


def pages_of(node: int) -> dict[int, Page]:
    """The pages of a node whose ranks are in a step."""
    pages = {
        rank: Page(mmap.mmap(-1, SIZE), "", os.getpid(), "") for rank in range(node * PER_NODE, (node + 1) * PER_NODE)
    }
    for page in pages.values():
        page.write("position", [123_456, 100_000, PHASE, time.monotonic()])
        page.write("pulse", [time.monotonic(), False])
        page.write("last", {f"nccl {group} default_pg_of_an_axis": 6_464 for group in range(9)})
    return pages


def collectors_of(ranks: int, stores: Sequence[Any]) -> list[Collector]:
    nodes = ranks // PER_NODE
    found = [Collector(stores[node], [], pages_of(node), PROCESS, nodes, 0) for node in range(nodes)]
    for each in found:
        each._host = "n" * HOST_LENGTH
    return found


def of_heartbeats(ranks: int) -> list[Count]:
    """Keys, requests and bytes of all clients, per interval of the heartbeats, explanation and end."""
    store = CountingStore(dist.HashStore())
    shared = cast(dist.Store, store)
    collectors = collectors_of(ranks, [shared] * (ranks // PER_NODE))
    views = [View(shared, ranks) for _ in range(2)]
    for each in collectors:  # registers it
        each.beat()

    def one_interval() -> None:
        for each in collectors:
            each.beat()
        for view in views:
            view.read()

    def explain() -> None:
        store.compare_set("stacks", "", "20261129-120000")
        for each in collectors:
            each.beat()
        views[0].read()
        views[0].collectives()

    def end() -> None:
        for rank in range(ranks):
            note_left(shared, rank, ranks)

    found = []
    parts: dict[str, Callable[[], None]] = {"heartbeats": one_interval, "explanation": explain, "end": end}
    for part, act in parts.items():
        if part == "explanation":
            store.set("titanlite/first_failure", "3")
        before = dict(store.totals)
        act()
        found += [Count(part, ranks, name, store.totals[name] - before[name]) for name in store.totals]
    return found


@contextmanager
def server() -> Iterator[tuple[int, int]]:
    """(port, process) of a TCPStore in a process of its own."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline()), process.pid
        process.kill()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def store_seconds(ranks: int, seconds: float) -> dict[str, float]:
    """Of a healthy job, for so long, and of one explanation. share: CPU seconds of the store per second. late_s: how
    late the heartbeats of the last node are. explanation_s: an update of the view, with collectives."""
    nodes = ranks // PER_NODE
    with server() as (port, pid):

        def client() -> dist.Store:
            made = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=600))
            return dist.PrefixStore("titanlite/0123456789abcdef0123456789abcdef/positions", made)

        collectors = collectors_of(ranks, [client() for _ in range(nodes)])
        views = [View(client(), ranks) for _ in range(2)]
        for each in collectors:
            each.beat()
        ended, late = threading.Event(), [0.0]

        def give_beats(share: Sequence[Collector]) -> None:
            interval = interval_s(nodes)
            due = time.monotonic()
            while not ended.is_set():
                for number, each in enumerate(share):
                    time.sleep(max(0.0, due + interval * number / len(share) - time.monotonic()))
                    each.beat()
                due += interval
                late[0] = max(late[0], time.monotonic() - due)

        def read(view: View) -> None:
            while not ended.wait(interval_s(nodes)):
                view.read()

        threads = [threading.Thread(target=give_beats, args=(collectors[n::THREADS],)) for n in range(THREADS)]
        threads += [threading.Thread(target=read, args=(view,)) for view in views]
        before, begin = cpu_s(pid), time.monotonic()
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        share = (cpu_s(pid) - before) / (time.monotonic() - begin)
        asker = View(client(), ranks)
        begin = time.monotonic()
        asker.read()
        asker.collectives()
        explanation_s = time.monotonic() - begin
        ended.set()
        for thread in threads:
            thread.join()
    return {"share": share, "late_s": late[0], "explanation_s": explanation_s}


if __name__ == "__main__":
    for size in map(int, sys.argv[1:]):
        print(json.dumps([each._asdict() for each in of_heartbeats(size)]))
        print(size, store_seconds(size, 20.0), flush=True)
