"""What the collectors of all nodes say of all ranks, read in batches."""

import json
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch.distributed as dist

from titanlite.ranks.collector import PULSE_S, parse_address, parse_node
from titanlite.ranks.message import Seen
from titanlite.runtime.waiting import parse_value

T = TypeVar("T")

BATCH = 256
"""Keys per request: the store, which has one thread, parses a longer one again for each piece that arrives."""
MAX_UNSEEN = 8


class View:
    """The position and the heartbeat of each rank, at the last `read`. store: see Positions.background."""

    def __init__(self, store: dist.Store, size: int) -> None:
        self._store = store
        self._beats: dict[int, int] = {}  # of each collector
        now = time.monotonic()
        self.seen = {rank: Seen(changed_at=now, alive_at=now, node_at=now) for rank in range(size)}

    def read(self, tick: int = 0) -> None:
        """Update the view. tick: of the watch thread. Raises RuntimeError: the store is lost."""
        now = time.monotonic()
        for number, node in self._values("node", parse_node):
            if self._beats.get(number) == node.beat:
                continue
            self._beats[number] = node.beat
            for rank, row in node.ranks.items():
                if (seen := self.seen.get(rank)) is None:
                    continue
                seen.count, seen.step, seen.phase, seen.host = row.phases, row.step, row.phase, node.host
                seen.state, seen.has_left, seen.changed_at = row.state, row.has_left, now - row.phase_s
                seen.beats, seen.node_at = seen.beats + 1, now
                if row.state == "running":
                    seen.alive_at = max(seen.alive_at, now - row.pulse_s)
                    # Not by alive_at, which is late by the time that the value took, each time by another one.
                    seen.alive_tick = tick if row.pulse_s <= PULSE_S else seen.alive_tick

    def find_hosts(self) -> None:
        """Find the hosts of ranks that have ended before a collector has seen them. Raises RuntimeError."""
        unseen = [rank for rank, each in self.seen.items() if each.beats == 0]
        for rank in unseen[:MAX_UNSEEN]:
            if self._store.check([f"page/{rank}"]):
                host, _ = parse_value(self._store.get(f"page/{rank}"), parse_address) or ("", "")
                self.seen[rank].host = host or self.seen[rank].host

    def collectives(self) -> dict[int, dict[str, int]]:
        """The last collectives of each rank that has written them. Raises RuntimeError."""
        of_ranks = (each for _, found in self._values("collectives", _parse_numbers) for each in found.items())
        return {rank: last for rank, last in of_ranks if rank in self.seen}

    def late(self) -> list[int]:
        """The ranks that have not left. Raises RuntimeError."""
        self.read()
        return [rank for rank, each in self.seen.items() if not (each.has_left or self._store.check([f"left/{rank}"]))]

    def _values(self, kind: str, parse: Callable[[bytes], T]) -> Iterator[tuple[int, T]]:
        """The values of this kind, with the numbers of the collectors that have written them."""
        count = self._store.add("collectors", 0)
        for first in range(1, min(count, len(self.seen) * 2) + 1, BATCH):
            numbers = [*range(first, min(first + BATCH, count + 1))]
            if not self._store.check([f"{kind}/{number}" for number in numbers]):
                numbers = [number for number in numbers if self._store.check([f"{kind}/{number}"])]
            values = self._store.multi_get([f"{kind}/{number}" for number in numbers]) if numbers else []
            for number, value in zip(numbers, values, strict=True):
                if (found := parse_value(value, parse)) is not None:
                    yield number, found


def _parse_numbers(value: bytes) -> dict[int, dict[str, int]]:
    content = json.loads(value)
    return {int(rank): {group: int(number) for group, number in last.items()} for rank, last in content.items()}
