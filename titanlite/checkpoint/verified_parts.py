"""Read parts of the files of a checkpoint in a store. Each part that several ranks need is read by one of them, which
verifies it and sends it to the others: a part that all ranks need by a broadcast."""

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from titanlite.checkpoint.manifest import PART_BYTES, FileRecord, InvalidCheckpointError, changed
from titanlite.storage.store import Store

PARTS_AHEAD = 4
"""Parts that a rank reads at the same time, and that it may have sent before the others have taken them. Up to twice as
many are in its memory."""


class Part(NamedTuple):
    """A part of a file, by its number."""

    name: str
    number: int


class Share(NamedTuple):
    """A part that a rank needs. reader: rank of the group that reads it. receivers: to which this rank sends it.
    is_for_all: all ranks of the group need it, such as that of a replicated tensor: the reader broadcasts it."""

    part: Part
    reader: int
    receivers: Sequence[int] = ()
    is_for_all: bool = False


class PartnerError(Exception):
    """The reader of a part has failed. It raises its own error."""


def part_bytes(record: FileRecord) -> int:
    """The size of all parts of a file but its last one."""
    return PART_BYTES if record.parts else max(record.bytes, 1)


def parts_of(name: str, record: FileRecord, start: int, length: int) -> list[Part]:
    """The parts that contain bytes [start, start + length) of a file. Raises InvalidCheckpointError."""
    if start < 0 or start + length > record.bytes:
        raise InvalidCheckpointError(f"the metadata of the checkpoint names more bytes of {name} than it has")
    size = part_bytes(record)
    return [Part(name, number) for number in range(start // size, (start + length - 1) // size + 1)]


def share_parts(needed: Sequence[Sequence[Part]], records: Mapping[str, FileRecord]) -> list[list[Share]]:
    """Choose for each part one reader among the ranks that need it, so that each rank reads about as many bytes.

    needed: per rank, sorted and without duplicates; so are the shares.
    """
    ranks: dict[Part, list[int]] = {}
    for rank, parts in enumerate(needed):
        for part in parts:
            ranks.setdefault(part, []).append(rank)
    shares: list[list[Share]] = [[] for _ in needed]
    read = [0] * len(needed)
    for part in sorted(ranks):
        reader = min(ranks[part], key=lambda rank: read[rank])
        read[reader] += part_bytes(records[part.name])
        is_for_all = 1 < len(needed) == len(ranks[part])
        for rank in ranks[part]:
            others = [each for each in ranks[part] if each != reader] if rank == reader and not is_for_all else []
            shares[rank].append(Share(part, reader, others, is_for_all))
    return shares


class VerifiedParts:
    """The parts that this rank needs, in the order of `shares`. With a group, a collective from the constructor until
    close().

    All ranks take, send and broadcast their parts in one order, that of the files' names, so none waits for one that
    waits for it.
    """

    def __init__(
        self, store: Store, records: Mapping[str, FileRecord], shares: Sequence[Share], group: dist.ProcessGroup | None
    ) -> None:
        self._store = store
        self._records = records
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._shares = deque(shares)
        self._unread = deque(share.part for share in shares if share.reader == self._rank)
        self._reading: deque[Future[bytes]] = deque()
        self._sent: deque[list[tuple[Tensor, dist.Work]]] = deque()
        self._threads = ThreadPoolExecutor(PARTS_AHEAD)
        self._current: tuple[Part | None, memoryview] = None, memoryview(b"")

    def get(self, part: Part) -> memoryview:
        """The content of a part: the one that was got last, or a later one. Raises PartnerError."""
        while self._current[0] != part:
            share = self._shares.popleft()
            self._current = share.part, self._own(share) if share.reader == self._rank else self._received(share)
        return self._current[1]

    def _own(self, share: Share) -> memoryview:
        while self._unread and len(self._reading) < PARTS_AHEAD:
            self._reading.append(self._threads.submit(self._read, self._unread.popleft()))
        try:
            content = self._reading.popleft().result()
        except BaseException:
            self._send(share, b"")
            raise
        self._send(share, content)
        return memoryview(content)

    def _read(self, part: Part) -> bytes:
        record = self._records[part.name]
        size = part_bytes(record)
        start = part.number * size
        try:
            content = self._store.read_range(part.name, start, min(size, record.bytes - start))
        except FileNotFoundError:
            raise InvalidCheckpointError(f"{part.name} (written by rank {record.rank}) is missing") from None
        if xxhash.xxh3_128_hexdigest(content) != (record.parts or (record.hash,))[part.number]:
            raise changed(part.name, record)
        return content

    def _send(self, share: Share, content: bytes) -> None:
        """Send a part's number of bytes, 0 if it cannot be read, and its content."""
        if share.is_for_all or share.receivers:
            messages = [torch.tensor(len(content)), torch.frombuffer(bytearray(content or b"-"), dtype=torch.uint8)]
            sent = messages if content else messages[:1]
            if share.is_for_all:
                for each in sent:
                    dist.broadcast(each, group=self._group, group_src=self._rank)
            self._sent.append([(each, self._sending(each, rank)) for rank in share.receivers for each in sent])
        while len(self._sent) > PARTS_AHEAD:
            self._wait_for_oldest()

    def _sending(self, tensor: Tensor, rank: int) -> dist.Work:
        work = dist.isend(tensor, group=self._group, group_dst=rank)
        assert work is not None, "this rank is in the group"
        return work

    def _wait_for_oldest(self) -> None:
        for _, work in self._sent.popleft():
            work.wait()

    def _received(self, share: Share) -> memoryview:
        receive = dist.broadcast if share.is_for_all else dist.recv
        size = torch.tensor(0)
        receive(size, group=self._group, group_src=share.reader)
        if not size:
            raise PartnerError
        content = torch.empty(int(size), dtype=torch.uint8)
        receive(content, group=self._group, group_src=share.reader)
        return memoryview(content.numpy().data)

    def close(self) -> None:
        """Take the parts that were not got, after a failure, tell the others that this rank reads no more, and wait
        until they have taken theirs."""
        while self._shares:
            share = self._shares.popleft()
            if share.reader == self._rank:
                self._send(share, b"")
                continue
            try:
                self._received(share)
            except PartnerError:
                continue
        while self._sent:
            self._wait_for_oldest()
        self._threads.shutdown(wait=False, cancel_futures=True)
