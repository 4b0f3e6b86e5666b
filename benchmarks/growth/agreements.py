"""Agreements of the start and gloo groups: requests and bytes of the store of the ranks, which are threads here."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from benchmarks.growth.count import Count
from titanlite.ranks.agreement import decide_on_rank_0, require_equal, share_from_rank_0
from titanlite.ranks.distributed import World
from titanlite.ranks.network import agree_on_attempt, require_gloo_address
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log

LOCAL = 8
"""Ranks of a node."""
TIMEOUT_S = 60
FACTS = {f"fact {number}": "x" * 40 for number in range(200)}


class CountingStore(dist.Store):
    """A store of one process that counts requests, and the bytes of keys and values.

    A read of several keys is two requests, as in torch's client: a wait comes before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self.requests = self.num_bytes = 0

    def _note(self, keys: Sequence[str], values: Sequence[bytes] = (), requests: int = 1) -> None:
        self.requests += requests
        self.num_bytes += requests * sum(map(len, keys)) + sum(map(len, values))

    def set(self, key: str, value: Any) -> None:
        value = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._values[key] = value
            self._note([key], [value])
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        with self._changed:
            self._changed.wait_for(lambda: self._values.keys() >= {*keys}, TIMEOUT_S)
            found = [self._values[key] for key in keys]
            self._note(keys, found, requests=2)
        return found

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            self._note(keys)
            return self._values.keys() >= {*keys}

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=TIMEOUT_S)) -> None:
        with self._changed:
            self._note(keys)
            if not self._changed.wait_for(lambda: self._values.keys() >= {*keys}, timeout.total_seconds()):
                raise dist.DistStoreError("late")

    def add(self, key: str, value: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + value
            self._values[key] = str(total).encode()
            self._note([key])
            self._changed.notify_all()
        return total

    def append(self, key: str, value: Any) -> None:
        with self._changed:
            self._values[key] = self._values.get(key, b"") + bytes(value)
            self._note([key], [bytes(value)])
            self._changed.notify_all()

    def has_extended_api(self) -> bool:
        return True


Work = Callable[[World, dist.Store], object]


def costs(part: str, size: int, work: Work) -> Iterator[Count]:
    """What the store of `size` ranks does for `work` of all of them. A UserError that all raise is no error."""
    store = CountingStore()

    def of_rank(rank: int) -> None:
        try:
            work(World(rank, rank % LOCAL, size, "cpu", min(LOCAL, size)), dist.PrefixStore("titanlite", store))
        except UserError as error:
            if not error.is_shared:
                raise

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(of_rank, range(size)))
    yield Count(part, size, "requests", store.requests)
    yield Count(part, size, "bytes", store.num_bytes)


def of_start(size: int) -> Iterator[Count]:
    """The agreements between the launch and the first process group."""

    def different(world: World, store: dist.Store) -> None:
        facts = {**FACTS, "host": str(world.rank // LOCAL)}
        require_equal("nodes", facts, world, store, TIMEOUT_S)

    parts: dict[str, Work] = {
        "a name of the attempt": lambda world, store: agree_on_attempt(store, world.rank, world.size, TIMEOUT_S),
        "addresses of gloo": require_gloo_address,
        "equal facts": lambda world, store: require_equal("all", FACTS, world, store, TIMEOUT_S),
        "facts that differ on all nodes": different,
        "a decision of rank 0": lambda world, store: decide_on_rank_0("9 GiB", len, world, store, TIMEOUT_S),
        "a result of rank 0": lambda world, store: share_from_rank_0("a", lambda: 1, world, store, TIMEOUT_S),
    }
    log.setLevel(logging.ERROR)  # threads wait for each other for seconds
    with patch("titanlite.ranks.network.gloo_address", lambda: "10.0.0.1"):
        for part, work in parts.items():
            yield from costs(part, size, work)


def of_groups(size: int) -> list[Count]:
    """One gloo group of all ranks, connected lazily, in a process of its own: gloo reads the variable once."""
    command = [sys.executable, "-m", "benchmarks.growth.agreements", str(size)]
    output = subprocess.check_output(command, env={**os.environ, "TORCH_GLOO_LAZY_INIT": "1"}, text=True)
    return [Count(*each) for each in json.loads(output)]


def _group(size: int) -> Iterator[Count]:
    store = CountingStore()
    begin = len(os.listdir("/proc/self/fd"))
    name = dist.PrefixStore("titanlite/0123456789abcdef0123456789abcdef/default", store)
    with ThreadPoolExecutor(size) as pool:
        groups = list(pool.map(lambda rank: dist.ProcessGroupGloo(name, rank, size, timedelta(minutes=1)), range(size)))
    yield Count("a gloo group", size, "requests", store.requests)
    yield Count("a gloo group", size, "bytes", store.num_bytes)
    yield Count("a gloo group", size, "open files", len(os.listdir("/proc/self/fd")) - begin)
    del groups


if __name__ == "__main__":
    print(json.dumps(list(_group(int(sys.argv[1])))), flush=True)
    os._exit(0)
