"""Memory of a rank that other processes of its node read and write, also while the rank holds Python's lock.

Does not import torch.
"""

import ctypes
import json
import mmap
import os
import secrets
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

from titanlite.runtime.waiting import parse_value

NAME = "titanlite-rank"
"""Of the memory of a page, as in /proc/PID/fd: nothing else is opened."""
RECORDS = {
    "token": (0, 128),
    "position": (128, 1024),
    "pulse": (1152, 128),
    "order": (2048, 2048),
    "last": (4096, 61440),
}
"""Name -> (offset, bytes). position: written by the main thread. pulse: by the watch thread. last: the collectives, on
request. order: by the process that collects the ranks of the node, see collector.py."""
SIZE = 65_536
_HEAD = 8
_MFD_CLOEXEC = 1  # linux/memfd.h

State = Literal["running", "stopped", "ended"]


class Page:
    """A value of JSON per record. Each record has one writer at a time; a reader never sees half a value.

    address: for `open` in another process of the node; "" if the system has no such memory, as others than Linux.
    """

    def __init__(self, memory: mmap.mmap, address: str, pid: int, began: str) -> None:
        self._memory = memory
        self.address = address
        self.pid = pid
        self._began = began
        self._last_read: dict[str, Any] = {}

    @classmethod
    def create(cls) -> Self:
        """The page of this process. Its memory is freed when no process has it any more."""
        pid, token = os.getpid(), secrets.token_hex(16)
        began = _stat(pid)[1]
        descriptor = _new_memory() if sys.platform == "linux" and began else -1
        if descriptor >= 0:
            os.ftruncate(descriptor, SIZE)
        address = f"{pid} {descriptor} {began} {token}" if descriptor >= 0 else ""
        page = cls(mmap.mmap(descriptor, SIZE), address, pid, began)
        page.write("token", token)
        return page

    @classmethod
    def open(cls, address: str) -> Self:
        """The page of another process of this node. Raises OSError, ValueError: it is of another node, or container."""
        pid, descriptor, began, token = address.split()
        file = Path(f"/proc/{int(pid)}/fd/{int(descriptor)}")
        if not os.readlink(file).startswith(f"/memfd:{NAME} ") or _stat(int(pid))[1] != began:
            raise ValueError(f"{file} is no page of a rank")
        with file.open("r+b") as opened:
            page = cls(mmap.mmap(opened.fileno(), SIZE), address, int(pid), began)
        if page.read("token") != token:
            raise ValueError(f"{file} is the page of another rank")
        return page

    def write(self, record: str, value: object) -> None:
        offset, size = RECORDS[record]
        content = json.dumps(value).encode()
        if len(content) > size - _HEAD:
            return
        head = len(content).to_bytes(4, "little") + zlib.crc32(content).to_bytes(4, "little")
        self._memory[offset : offset + _HEAD + len(content)] = head + content

    def read(self, record: str) -> Any:
        """The value that was written last, or the one that was read last while it is written; None: there is none."""
        offset, size = RECORDS[record]
        head = self._memory[offset : offset + _HEAD]
        length, check = int.from_bytes(head[:4], "little"), int.from_bytes(head[4:], "little")
        content = self._memory[offset + _HEAD : offset + _HEAD + min(length, size - _HEAD)]
        if content and zlib.crc32(content) == check:
            self._last_read[record] = parse_value(content, json.loads)
        return self._last_read.get(record)

    def state(self) -> State:
        """Of the process."""
        if not self._began:
            return "running"
        code, began = _stat(self.pid)
        if began != self._began or code in "ZXx":
            return "ended"
        return "stopped" if code == "T" else "running"


def _new_memory() -> int:
    """A descriptor of empty memory; -1 if the system forbids it. By libc: Python builds for many systems, as that of
    uv, lack os.memfd_create."""
    create = getattr(ctypes.CDLL(None), "memfd_create", None)
    return -1 if create is None else int(create(NAME.encode(), _MFD_CLOEXEC))


def _stat(pid: int) -> tuple[str, str]:
    """The state of a process, as a letter, and when it began, in the clock ticks of the system; "" for none."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return fields[0], fields[19]
    return "", ""
