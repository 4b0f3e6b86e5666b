"""Files of sources in object stores, at addresses such as s3://bucket/corpus/a.jsonl.

Objects are read by ranges, most of them through the cache folder. What is read has the content that the object had when
the run started: if it has changed since, reading it raises UserError.
"""

import io
import mmap
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import astuple
from fnmatch import fnmatchcase
from functools import lru_cache, partial, total_ordering
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any, TypeVar

from titanlite.data.sources.pieces import Bytes
from titanlite.data.sources.seekable import SeekableReader
from titanlite.runtime.cache import built_once, cache_folder, cached_folder, file_facts
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import open_regular
from titanlite.runtime.json_files import MAX_BYTES, JsonError
from titanlite.runtime.parts import Part, Parts
from titanlite.storage.address import Address
from titanlite.storage.store import Facts, Store, in_parallel

T = TypeVar("T")

HEAD_BYTES = 2**18 + 2**12
BLOCK_BYTES = 2**23
"""Sizes of the first block of a file, and of the others. Checks before a run need no more than the first one."""

BLOCKS_AHEAD = 2
"""Blocks that are fetched in the background after a block that was not in the cache."""

EXTENTS_AHEAD = 32
"""Extents that a process may have asked for in the background: it waits for them when it ends."""

FIRST_RANGE_BYTES = 2**16
"""First range of a file that is read from its beginning. Each further one is four times as large, up to BLOCK_BYTES."""

_CACHE_BYTES = "TITANLITE_CACHE_BYTES"
"""Environment variable with data.cache_bytes: worker processes inherit it."""

_MAGIC = re.compile(r"[*?[]")


def apply_cache_bytes(limit: int) -> None:
    """Let this process, and those that it starts, keep data.cache_bytes of stored files in the cache folder."""
    os.environ.pop(_CACHE_BYTES, None)
    if limit >= 0:
        os.environ[_CACHE_BYTES] = str(limit)


def stored_parts() -> Parts:
    """The parts of stored files in the cache folder."""
    return _parts(cache_folder() / "parts", int(os.environ.get(_CACHE_BYTES, "-1")), os.getpid())


@lru_cache(1)
def _parts(folder: Path, limit: int, process: int) -> Parts:  # noqa: ARG001 a fork must not use those of its parent
    return Parts(folder, limit)


class Listing:
    """The objects that a path, an address, selects at the time of the call. Raises UserError.

    An object or a folder that exists is no pattern, whatever its name, as on a disk. base: the path without its
    pattern. is_folder: whether it is that of a folder. files: the objects that it selects, sorted by address, without
    hidden ones; of a folder, all below it.
    """

    def __init__(self, path: str) -> None:
        parts = path.rstrip("/").split("/")
        literal = max(3, next((n for n, part in enumerate(parts) if _MAGIC.search(part)), len(parts)))
        self._facts: dict[Address, Facts | None] = {}
        self._select(Address.parse("/".join(parts[:literal])), parts[literal:], names_folder=path.endswith("/"))

    def _select(self, base: Address, pattern: list[str], *, names_folder: bool) -> None:
        """Find the objects below `base` whose names match the parts of a pattern. names_folder: whether the path ends
        with "/"."""
        self.base = base
        self.is_folder = self._is_deep = False
        store = Store(base)
        if not pattern and base.path != base.bucket and not names_folder:
            try:
                self._facts = {base: store.facts()}
                self.files = [StoredFile(base, self)]
                return
            except FileNotFoundError:
                pass
        self._is_deep = len(pattern) != 1 or pattern == ["**"]
        found = (store.list if self._is_deep else store.children)()
        if existing := _existing_parts(pattern, found):
            base = Address(base.protocol, "/".join([base.path, *pattern[:existing]]))
            self._select(base, pattern[existing:], names_folder=names_folder)
            return
        listed = {name: facts for name, facts in found.items() if facts}
        self._facts = {base / name: facts for name, facts in listed.items()}
        self.is_folder = bool(listed) and not pattern
        selected = (name for name in listed if _matches(name.split("/"), pattern or ["**", "*"]))
        self.files = sorted(StoredFile(base / name, self) for name in selected)

    def facts(self, address: Address) -> Facts | None:
        """Size and ETag of an object; None if it does not exist. Asks the store once if the object is not listed."""
        is_listed = address.is_relative_to(self.base) if self._is_deep else address.parent == self.base
        if address not in self._facts and is_listed and address != self.base:
            return None
        if address not in self._facts:
            self._facts[address] = None
            with suppress(FileNotFoundError):
                self._facts[address] = Store(address).facts()
        return self._facts[address]


def _existing_parts(pattern: Sequence[str], names: Iterable[str]) -> int:
    """How many first parts of a pattern are the name of an object or a folder as they are written: "part[1].jsonl".

    names: those below the place where the pattern begins."""
    for count in range(len(pattern), 0, -1):
        name = "/".join(pattern[:count])
        if any((each == name and count == len(pattern)) or each.startswith(f"{name}/") for each in names):
            return count
    return 0


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """Whether the parts of a name match those of a pattern, as in glob.glob: "**" stands for any number of folders, and
    no wildcard matches a hidden file or folder."""
    if not pattern:
        return not parts
    if pattern[0] == "**" and _matches(parts, pattern[1:]):
        return True
    if not parts or (parts[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    if pattern[0] == "**":
        return _matches(parts[1:], pattern)
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


@total_ordering
class StoredFile:
    """An object in a store, with the part of the interface of Path that sources use."""

    def __init__(self, address: Address, listing: Listing) -> None:
        self.address = address
        self._listing = listing

    def __str__(self) -> str:
        return str(self.address)

    def __repr__(self) -> str:
        return f"StoredFile({self})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredFile) and self.address == other.address

    def __lt__(self, other: "StoredFile") -> bool:
        return self.address < other.address

    def __hash__(self) -> int:
        return hash(self.address)

    def __truediv__(self, name: str) -> "StoredFile":
        return StoredFile(self.address / name, self._listing)

    @property
    def name(self) -> str:
        return self.address.name

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    @property
    def parent(self) -> "StoredFile":
        return StoredFile(self.address.parent, self._listing)

    def with_suffix(self, suffix: str) -> "StoredFile":
        return self.parent / Path(self.name).with_suffix(suffix).name

    def exists(self) -> bool:
        return self._listing.facts(self.address) is not None

    is_file = exists

    def is_symlink(self) -> bool:
        return False

    @property
    def facts(self) -> Facts:
        """Size and ETag when the source was listed. Raises FileNotFoundError."""
        facts = self._listing.facts(self.address)
        if facts is None:
            raise FileNotFoundError(None, "does not exist", str(self))
        return facts

    @property
    def identity(self) -> tuple[str, int, str]:
        """What decides its content: address, size and ETag. Raises FileNotFoundError."""
        return str(self), self.facts.bytes, self.facts.etag

    def fetch(self, begin: int, end: int) -> bytes:
        """Bytes [begin, end), from the store. Raises UserError if the object has changed since it was listed."""
        try:
            data = self.read(begin, end)
        except (UserError, FileNotFoundError):
            self.check_unchanged()
            raise
        self.check_unchanged()
        assert len(data) == end - begin, "the object has its size"
        return data

    def copy_of(self, folder: str) -> Path:
        """A copy in the cache folder of the small files below this object's name and `folder`."""
        store = Store(self.address / folder)
        names = store.list()

        def build(into: Path) -> None:
            for name in names:
                store.copy_to(into, name)

        facts = [str(store.address), sorted((name, *astuple(of)) for name, of in names.items())]
        return built_once(cached_folder("stored", facts), str(store.address), build)

    def read_all(self) -> bytes:
        """The content of a small object. Raises FileNotFoundError, UserError, and JsonError if it is not small."""
        if self.facts.bytes > MAX_BYTES:
            raise JsonError(f"has {self.facts.bytes:,} bytes, more than {MAX_BYTES:,}")
        return self.fetch(0, self.facts.bytes)

    def read(self, begin: int, end: int) -> bytes:
        """As fetch, of the object as it is now; see check_unchanged."""
        start, parts = time.monotonic(), stored_parts()
        data = Store(self.address).read_range("", begin, end - begin)
        parts.fetched_bytes += len(data)
        parts.fetch_s += time.monotonic() - start
        return data

    def check_unchanged(self) -> None:
        """Raise UserError if the object has changed since it was listed, or was deleted."""
        try:
            now = Store(self.address).facts()
        except FileNotFoundError:
            raise UserError(f"{self} was deleted while it was in use: {_RESTORE}") from None
        if now != self.facts:
            before, after = (f"{facts.bytes:,} bytes and ETag {facts.etag}" for facts in (self.facts, now))
            raise UserError(
                f"{self} was written while it was in use: it has {after} instead of {before}: {_RESTORE}, or accept "
                "the new content when you resume"
            )

    def block(self, number: int) -> Part:
        """Block `number`, from the cache folder."""
        begin, end = block_bounds(number, self.facts.bytes)

        def fetch() -> bytes:
            for later in range(number + 1, number + 1 + BLOCKS_AHEAD if number else 0):
                if (bounds := block_bounds(later, self.facts.bytes))[0] < self.facts.bytes:
                    _threads(os.getpid()).submit(self._prepare, *bounds)
            return self.fetch(begin, end)

        return stored_parts().get([*self.identity, begin, end], end - begin, fetch)

    def _prepare(self, begin: int, end: int) -> None:
        stored_parts().prepare([*self.identity, begin, end], end - begin, partial(self.fetch, begin, end))

    def read_within(self, extent: tuple[int, int], out: memoryview, begin: int) -> int:
        """Fill `out`, which consists of bytes, from byte `begin` on; return the number of bytes read. extent: the bytes
        around these to fetch in one request if the cache folder does not have them; see prepare."""
        first, last = extent
        assert first <= begin <= begin + len(out) <= last, "the digest of a part follows its content"
        if last <= HEAD_BYTES:  # checks before the run have fetched it
            first, part = 0, self.block(0)
        else:
            part = self.range(first, last)
        out[:] = part[begin - first : begin - first + len(out)]
        return len(out)

    def prepare(self, extent: tuple[int, int]) -> None:
        """Fetch an extent in the background, unless many others are being fetched."""
        begin, end = extent
        waiting = _extents_ahead(os.getpid())
        if end > HEAD_BYTES and waiting.acquire(blocking=False):
            fetched = _threads(os.getpid()).submit(self._prepare, begin, end)
            fetched.add_done_callback(lambda _: waiting.release())

    def range(self, begin: int, end: int) -> Part:
        """Bytes [begin, end), from the cache folder."""
        return stored_parts().get([*self.identity, begin, end], end - begin, partial(self.fetch, begin, end))

    def blocks(self) -> "Blocks":
        return Blocks(self.facts.bytes, self.block)

    def open(self, cached: list[tuple[int, int]] | None = None) -> io.BufferedReader:
        """Open it for reading; see ObjectReader."""
        return io.BufferedReader(ObjectReader(self, [] if cached is None else cached), FIRST_RANGE_BYTES)


_RESTORE = "restore the object, and start again: the run resumes from its latest checkpoint"


@lru_cache(1)
def _threads(process: int) -> ThreadPoolExecutor:  # noqa: ARG001 a fork has no threads of its parent
    """Threads that read ahead."""
    return ThreadPoolExecutor(4, "titanlite-store")


@lru_cache(1)
def _extents_ahead(process: int) -> BoundedSemaphore:  # noqa: ARG001 as _threads
    return BoundedSemaphore(EXTENTS_AHEAD)


def block_bounds(number: int, size: int) -> tuple[int, int]:
    """The bytes [begin, end) of a block of a file of `size` bytes."""
    begin = HEAD_BYTES + (number - 1) * BLOCK_BYTES if number else 0
    return begin, min(size, HEAD_BYTES + number * BLOCK_BYTES)


def block_of(position: int) -> int:
    """The number of the block of a byte."""
    return 0 if position < HEAD_BYTES else 1 + (position - HEAD_BYTES) // BLOCK_BYTES


class Blocks:
    """The Bytes of a file whose blocks are in the cache folder. size: their number. block: a block by its number."""

    def __init__(self, size: int, block: Callable[[int], Part]) -> None:
        self._size = size
        self._block = block
        self._last: tuple[int, int, int, Part] | None = None

    def __len__(self) -> int:
        return self._size

    def _at(self, position: int) -> tuple[int, int, Part]:
        """Begin, end and content of the block of a byte."""
        number, last = block_of(position), self._last
        if last is None or last[0] != number:
            self._last = last = (number, *block_bounds(number, self._size), self._block(number))
        return last[1:]

    def read(self, begin: int, end: int) -> bytes:
        """Bytes [begin, end), fewer if the file ends before."""
        found, end = [], min(end, self._size)
        while begin < end:
            first, last, part = self._at(begin)
            found.append(part[begin - first : min(end, last) - first])
            begin = last
        return b"".join(found)

    def read_into(self, out: memoryview, begin: int) -> int:
        """Fill `out`, which consists of bytes, from byte `begin` on; return the number of bytes read."""
        data = self.read(begin, begin + len(out))
        out[: len(data)] = data
        return len(data)

    def find(self, sub: bytes, start: int, end: int, /) -> int:
        """As bytes.find, of one byte."""
        while start < end:
            first, last, part = self._at(start)
            if (found := part.find(sub, start - first, min(end, last) - first)) >= 0:
                return first + found
            start = last
        return -1

    def rfind(self, sub: bytes, start: int, end: int, /) -> int:
        """As bytes.rfind, of one byte."""
        end = min(end, self._size)
        while start < end:
            first, _, part = self._at(end - 1)
            if (found := part.rfind(sub, max(start, first) - first, end - first)) >= 0:
                return first + found
            end = first
        return -1

    def __getitem__(self, key: int | slice, /) -> Any:
        if isinstance(key, slice):
            begin, end, _ = key.indices(self._size)
            return self.read(begin, end)
        first, _, part = self._at(key)
        return part[key - first]


class ObjectReader(SeekableReader):
    """Reads an object by ranges into memory, larger ones while it is read in order.

    cached: ranges (begin, end) that are read through the cache folder; more may be added later.
    """

    def __init__(self, file: StoredFile, cached: list[tuple[int, int]]) -> None:
        super().__init__(file.facts.bytes)
        self._file, self._cached, self._begin = file, cached, 0
        self._data: bytes | Part = b""
        self._length = 0
        self._step = FIRST_RANGE_BYTES // 4
        self._next: tuple[int, Future[bytes]] | None = None

    def readinto(self, out: Any, /) -> int:
        """Read up to the end of the range that has the position, so that no further one is fetched."""
        if self.position >= self.size:
            return 0
        if not 0 <= self.position - self._begin < self._length:
            self._load()
        begin = self.position - self._begin
        with memoryview(out) as view, view.cast("B") as target:
            count = min(len(target), self._length - begin)
            target[:count] = self._data[begin : begin + count]
        self.position += count
        return count

    def _load(self) -> None:
        """Get a range that begins at the position or before it."""
        follows = self.position == self._begin + self._length
        for begin, end in self._cached:
            if begin <= self.position < end:
                self._data = self._file.range(begin, end)
                self._begin, self._length = begin, end - begin
                return
        self._step = min(4 * self._step, BLOCK_BYTES) if follows else FIRST_RANGE_BYTES
        ahead, self._next = self._next, None
        if ahead is not None and ahead[0] == self.position:
            self._data = ahead[1].result()
        else:
            self._data = self._file.fetch(self.position, min(self.size, self.position + self._step))
        self._begin, self._length = self.position, len(self._data)
        after = self._begin + self._length
        if self._step == BLOCK_BYTES and after < self.size:
            end = min(self.size, after + BLOCK_BYTES)
            self._next = (after, _threads(os.getpid()).submit(self._file.fetch, after, end))


class BlockWriter:
    """Collects the blocks of content that is written in order, and passes each to `keep` with its number.

    size: bytes of the content. written: with those that truncate() has removed.
    """

    def __init__(self, keep: Callable[[int, bytes], None]) -> None:
        self._keep = keep
        self._buffer = bytearray()
        self._number = self.size = self.written = 0

    def write(self, data: bytes, /) -> int:
        self._buffer += data
        self.written += len(data)
        self.size = self.written
        while len(self._buffer) >= (length := HEAD_BYTES if self._number == 0 else BLOCK_BYTES):
            self._flush(length)
        return len(data)

    def _flush(self, length: int) -> None:
        self._keep(self._number, bytes(self._buffer[:length]))
        del self._buffer[:length]
        self._number += 1

    def tell(self) -> int:
        return self.size

    def truncate(self, size: int) -> None:
        """Reduce the size. Nothing is written afterwards."""
        self.size = size

    def finish(self) -> None:
        if self._buffer:
            self._flush(len(self._buffer))


SourceFile = Path | StoredFile
"""A file of a source."""


def open_file(file: SourceFile) -> io.BufferedReader:
    """Open a file for reading. Raises OSError, and UserError for an object that cannot be read."""
    return file.open() if isinstance(file, StoredFile) else open_regular(file)


def for_each(files: Sequence[SourceFile], function: Callable[[Any], T]) -> list[T]:
    """The result of `function` for each file; of several stored files at the same time."""
    if any(isinstance(file, StoredFile) for file in files):
        return in_parallel(function, files)
    return [function(file) for file in files]


def size_of(file: SourceFile) -> int:
    """Raises OSError."""
    return file.facts.bytes if isinstance(file, StoredFile) else file.stat().st_size


def facts_of(files: Sequence[SourceFile]) -> list[tuple[Any, ...]]:
    """What decides the content of each file, beginning with its name. Raises OSError."""
    return [file.identity if isinstance(file, StoredFile) else file_facts([file])[0] for file in files]


@contextmanager
def mapped(path: SourceFile | Blocks) -> Iterator[Bytes]:
    """Memory-map a file, or read it by blocks; an empty file, which cannot be mapped, gives empty bytes."""
    if not isinstance(path, Path):
        yield path if isinstance(path, Blocks) else path.blocks()
        return
    with open_regular(path) as opened:
        if not opened.seek(0, 2):
            yield b""
            return
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


def read_range(path: SourceFile | Blocks, offset: int, size: int) -> bytes:
    """Read `size` bytes of a file at `offset`. Raises OSError if the file is shorter."""
    if not isinstance(path, Path):
        return (path if isinstance(path, Blocks) else path.blocks()).read(offset, offset + size)
    with open_regular(path) as file:
        file.seek(offset)
        data = file.read(size)
    if len(data) != size:
        raise OSError("the file became shorter after it was indexed")
    return data
