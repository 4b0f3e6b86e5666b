"""A cache on disk for parts of files that are elsewhere, of bounded size: the least recently used parts are removed.

All processes of a node share it. The name of a part is a hash of the facts that decide its content: a change of the
file gives its parts new names.
"""

import errno
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from titanlite.runtime.cache import Recent, content_key, locked
from titanlite.runtime.durability import PARTIAL
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import open_regular
from titanlite.runtime.logging import log

MAPPED_BYTES = 512 * 2**20
"""Parts that a process keeps mapped: the text of about one block of the permutation, in which rows are read in random
order."""

KEPT_SHARE = 0.9
"""Share of the limit that is left when parts are removed, so that the next parts need not list the folder again."""

NUM_LOCKS = 64
"""Lock files for parts that are being made. Two parts may share one; then the second waits for the first."""

DIGEST_BYTES = 16
"""Bytes of the digest after the content of a part. It shows damage, such as that of a power failure."""

ABANDONED_S = 3600
"""Age after which an incomplete part is that of a process that was killed."""

TOTAL = "total"


Part = mmap.mmap
"""A part, followed by its digest."""


class Parts:
    """The parts below `folder`. limit: bytes of all parts; -1: half of the space that the disk has for them.

    Methods may be called from several threads. Raises UserError if the folder cannot be written.
    """

    def __init__(self, folder: Path, limit: int = -1) -> None:
        self.folder = folder
        self._limit = limit
        self._mapped: Recent[str, Part] = Recent(MAPPED_BYTES, len)
        self._mapping = threading.Lock()
        self.fetched_bytes = 0
        self.fetch_s = 0.0
        """Bytes that this process has fetched, also of what is not kept, and the seconds that its requests took."""

    def describe(self) -> str:
        """What this process has fetched so far, and the size of the cache, in one line."""
        size = self._total()
        return (
            f"fetched {self.fetched_bytes / 2**20:,.1f} MiB of stored files in {self.fetch_s:.1f} s; {self.folder} has "
            f"{size / 2**30:,.2f} of at most {self.limit / 2**30:,.2f} GiB"
        )

    def get(self, facts: Any, size: int, make: Callable[[], bytes], made_with: Any = None) -> Part:
        """The part of `size` bytes, more than 0, that `facts`, a JSON value, decide. Its digest follows its content.

        make: its content if the cache has no such part. One process calls it, and the others wait. made_with: the facts
        of a file if `make` also adds other parts of it by `add`.
        """
        name = content_key(facts)
        with self._mapping:
            is_mapped = name in self._mapped
        found = None if is_mapped else self._opened_or_made(name, size, make, made_with or facts)
        with self._mapping:
            return self._mapped.get(name, lambda: found or self._opened_or_made(name, size, make, made_with or facts))

    def prepare(self, facts: Any, size: int, make: Callable[[], bytes]) -> None:
        """As get, without mapping the part: for a thread that reads ahead."""
        name = content_key(facts)
        if not self._path(name).exists():
            self._opened_or_made(name, size, make, facts)

    def add(self, facts: Any, content: bytes) -> None:
        """Add a part, in `make`."""
        name = content_key(facts)
        if not self._path(name).exists():
            with self._errors():
                self.folder.mkdir(parents=True, exist_ok=True)
            self._written(name, content)

    def _opened_or_made(self, name: str, size: int, make: Callable[[], bytes], lock: Any) -> Part:
        if (found := self._opened(name, size)) is not None:
            return found
        with ExitStack() as stack:
            with self._errors():
                self.folder.mkdir(parents=True, exist_ok=True)
                file = self.folder / f"{int(content_key(lock), 16) % NUM_LOCKS}.lock"
                stack.enter_context(locked(file, "fetch a part of a file"))
            if (found := self._opened(name, size)) is not None:
                return found
            content = make()
            assert len(content) == size, "a part has the size that its facts decide"
            return self._written(name, content)

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / name

    def _opened(self, name: str, size: int) -> Part | None:
        """Map a part; None if it is missing or damaged."""
        path = self._path(name)
        with suppress(OSError, ValueError), open_regular(path) as file:  # an empty file cannot be mapped
            found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if len(found) == size + DIGEST_BYTES and found[size:] == xxhash.xxh3_128_digest(memoryview(found)[:size]):
                with suppress(OSError):  # another process may have removed it
                    os.utime(path)
                return found
            log.warning("%s is damaged and is fetched again", path)
        return None

    def _written(self, name: str, content: bytes) -> Part:
        """Write and map a part. It is mapped before it has its name, with which other processes may remove it."""
        path = self._path(name)
        partial = path.with_name(name + PARTIAL)
        with self._errors():
            path.parent.mkdir(exist_ok=True)
            self._reserve(partial, len(content) + DIGEST_BYTES)
            try:
                with open(partial, "rb+") as file:
                    file.write(content)
                    file.write(xxhash.xxh3_128_digest(content))
                    file.flush()
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                partial.rename(path)
            except OSError:
                partial.unlink(missing_ok=True)
                raise
        return mapped

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = "set the environment variable TITANLITE_CACHE to a folder that is writable and supports file locks"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                remedy = "write a smaller data.cache_bytes, or set TITANLITE_CACHE to a folder with more space"
            raise UserError(f"cannot write parts of files into {self.folder}: {error}; {remedy}") from error

    def _reserve(self, partial: Path, size: int) -> None:
        """Count a new part, and create its file. Remove the least recently used parts if all would exceed the limit."""
        with locked(self.folder / f"{TOTAL}.lock", "count the parts of files"):
            total = self._total()
            if total + size > self.limit:
                total = self._removed_to(int(KEPT_SHARE * self.limit) - size)
            (self.folder / TOTAL).write_text(str(total + size))
            with open(partial, "wb") as file:
                file.truncate(size)

    def _total(self) -> int:
        """Bytes of all parts, as they were counted when the last one was added: a cache may have very many."""
        try:
            return int((self.folder / TOTAL).read_text())
        except (OSError, ValueError):
            return sum(found.size for found in self._stored())

    @cached_property
    def limit(self) -> int:
        """Bytes of all parts together."""
        if self._limit >= 0:
            return self._limit
        existing = next(each for each in (self.folder, *self.folder.parents) if each.exists())
        return (self._total() + shutil.disk_usage(existing).free) // 2

    def _removed_to(self, target: int) -> int:
        """Remove the least recently used parts until all others have at most `target` bytes. Returns their bytes."""
        found = sorted(self._stored(), key=lambda part: part.used)
        total = sum(part.size for part in found)
        for part in found:
            if total <= target:
                break
            if part.path.endswith(PARTIAL) and time.time() - part.used < ABANDONED_S:
                continue
            Path(part.path).unlink(missing_ok=True)  # a process that has mapped it can still read it
            total -= part.size
        return total

    def _stored(self) -> Iterator["_Stored"]:
        """All parts, with those that are being written."""
        if not self.folder.is_dir():
            return
        for folder in filter(os.DirEntry.is_dir, os.scandir(self.folder)):
            for entry in os.scandir(folder.path):
                with suppress(FileNotFoundError):  # another process has renamed it
                    stat = entry.stat()
                    yield _Stored(stat.st_mtime, stat.st_size, entry.path)


class _Stored(NamedTuple):
    used: float
    size: int
    path: str
