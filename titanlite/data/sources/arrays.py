"""Arrays of integers in files, read by position.

Files are not memory-mapped: if a mapped file becomes shorter, SIGBUS ends the process without a message.
"""

import os
import re
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from titanlite.data.sources.stored import SourceFile, StoredFile, block_bounds
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import OpenFile, OpenFiles, read_at
from titanlite.runtime.retry import retrying

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""Versions of the .npy format. Version 3.0 is only for names of fields, which arrays of integers do not have."""

USUAL_BYTES = 128
_USUAL = re.compile(
    rb"\x93NUMPY\x01\0v\0\{'descr': '([<>|][iu][1248])', 'fortran_order': False, 'shape': \((\d{1,18}),\), \} *\n"
)
"""The header that numpy writes for a 1-D array of integers. Python's parser, for any other, takes most of the time of a
look at a file."""


class ArrayFile:
    """A 1-D array of integers in a file, which is opened when it is read, or in an object. len(): the number of
    elements. begin: the first byte of the elements. size, mtime_ns: of the file; an object has no time, but 0."""

    def __init__(self, path: SourceFile, raw_dtype: str = "", begin: int = 0, count: int | None = None) -> None:
        """raw_dtype: the type of the elements of a raw file, little-endian unless it says so; "": a .npy file. Raises
        UserError.

        begin, count: the first byte and the number of the elements of a raw file; None: all bytes are elements.
        """
        self.path = path
        raw = (raw_dtype, begin, count) if raw_dtype else None
        try:
            if isinstance(path, StoredFile):
                self._open_stored(path, raw)
                return
            found = OpenFile(path)
            size = found.facts.st_size
            if raw:
                self.dtype, self._count, self.begin = raw_layout(size, *raw)
            elif usual := usual_layout(found.read(0, USUAL_BYTES), size):
                self.dtype, self._count, self.begin = usual
            else:
                with open(found.descriptor, "rb", closefd=False) as file:
                    self.dtype, self._count, self.begin = _npy(file, size)
        except (ValueError, SyntaxError, TokenError, MemoryError, RecursionError) as error:  # the header is Python
            raise UserError(f"{path} is not a 1-D array of integers: {error}") from None
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
        self.size, self.mtime_ns = found.facts.st_size, found.facts.st_mtime_ns
        self._local, self._number = path, _FILES.add(found)
        weakref.finalize(self, _FILES.discard, self._number)
        self._read_stored: Callable[[memoryview, int], int] | None = None

    def _open_stored(self, file: StoredFile, raw: tuple[str, int, int | None] | None) -> None:
        self.size, self.mtime_ns, self._number = file.facts.bytes, 0, 0
        with file.open([block_bounds(0, self.size)]) as opened:
            self.dtype, self._count, self.begin = raw_layout(self.size, *raw) if raw else _npy(opened, self.size)
        self._read_stored = file.blocks().read_into

    def __len__(self) -> int:
        return self._count

    def read(self, begin: int, end: int, extent: tuple[int, int] | None = None) -> npt.NDArray[Any]:
        """Elements `begin` to `end` - 1, in the file's dtype. Raises UserError if the file has changed.

        extent: the elements around these that a store is asked for at once; None: those of a block of the file.
        """
        out: npt.NDArray[Any] = np.empty(end - begin, self.dtype)
        first = self.begin + begin * self.dtype.itemsize
        raw = out.view(np.uint8).data
        read = self._read_stored or self._read_opened
        if extent is not None and isinstance(self.path, StoredFile):
            read = partial(self.path.read_within, self._bytes_of(extent))
        try:
            count = retrying(str(self.path), partial(read, raw, first))
        except OSError as error:
            raise UserError(f"{self.path} can no longer be read at byte {first:,}: {error.strerror}") from None
        if count < len(raw):
            size = _FILES.facts(self._number, self._local).st_size
            raise UserError(
                f"{self.path} became shorter while it was in use: it has {size:,} bytes instead of "
                f"{self.size:,}, and bytes {first:,} to {first + len(raw) - 1:,} are needed; copy or write "
                "it again, and start again: the run resumes from its latest checkpoint"
            )
        return out

    def stop_reading_ahead(self) -> None:
        """See OpenFile; until the file is opened again. Objects are read by blocks."""
        with suppress(OSError, UserError):  # those of a file that is gone: a read reports it
            if self._number:
                _FILES.get(self._number, self._local).stop_reading_ahead()

    def prepare(self, extent: tuple[int, int]) -> None:
        """Fetch these elements of a stored file in the background, see StoredFile.prepare."""
        if isinstance(self.path, StoredFile):
            self.path.prepare(self._bytes_of(extent))

    def _bytes_of(self, extent: tuple[int, int]) -> tuple[int, int]:
        begin, end = (self.begin + element * self.dtype.itemsize for element in extent)
        return begin, end

    def _read_opened(self, out: memoryview, position: int) -> int:
        """Fill `out` from a byte of the file, which is opened again if needed. Raises OSError, and UserError if it has
        changed since it was opened first."""
        file = _FILES.get(self._number, self._local)
        require_unchanged(self.path, file.facts, self.size, self.mtime_ns)
        return read_at(file.descriptor, out, position)

    def check_unchanged(self) -> None:
        """Raise UserError if the file's size or time has changed since it was opened. An object is checked when a part
        of it is fetched."""
        if not self._number:
            return
        try:
            found = _FILES.facts(self._number, self._local)
        except OSError as error:
            raise UserError(f"{self.path} can no longer be read: {error.strerror}") from None
        require_unchanged(self.path, found, self.size, self.mtime_ns)


def require_unchanged(path: SourceFile, found: os.stat_result, size: int, mtime_ns: int) -> None:
    """Raise UserError unless a file has this size and time. found: those of now."""
    if (found.st_size, found.st_mtime_ns) != (size, mtime_ns):
        raise UserError(
            f"{path} was written while it was in use: it has {found.st_size:,} bytes, last modified at "
            f"{datetime.fromtimestamp(found.st_mtime):%Y-%m-%d %H:%M:%S}; copy or write it again if its tokens "
            "have changed, and start again: the run resumes from its latest checkpoint"
        )


_FILES = OpenFiles()
"""Those of all arrays of this process."""


def raw_layout(size: int, dtype: str, begin: int = 0, count: int | None = None) -> tuple[np.dtype[Any], int, int]:
    """(dtype, number of elements, first byte) of a raw file. Raises ValueError."""
    kind = np.dtype(dtype) if dtype[0] in "<>" else np.dtype(dtype).newbyteorder("<")
    if count is None:
        if size == 0 or size % kind.itemsize:
            raise ValueError(f"{size:,} bytes are not a multiple of {kind.itemsize}, the size of {dtype}")
        count = size // kind.itemsize
    _require_end(begin, count, kind, size)
    return kind, count, begin


def _require_end(begin: int, count: int, dtype: np.dtype[Any], size: int) -> None:
    end = begin + count * dtype.itemsize
    if not begin <= end <= size:
        raise ValueError(f"its {count:,} elements would end at byte {end:,}, but it has {size:,} bytes")


def _npy(file: BinaryIO, size: int) -> tuple[np.dtype[Any], int, int]:
    """(dtype, number of elements, first byte) of a .npy file. Raises ValueError, and other errors for a bad header."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"version {version} of the .npy format is not supported")
    shape, _, dtype = _HEADERS[version](file)
    if len(shape) != 1 or dtype.kind not in "iu":
        raise ValueError(f"it is {len(shape)}-D {dtype}")
    begin = file.tell()
    _require_end(begin, shape[0], dtype, size)
    return dtype, shape[0], begin


def usual_layout(head: bytes, size: int) -> tuple[np.dtype[Any], int, int] | None:
    """As _npy, of the header that numpy writes; None for any other. head: the first bytes. Raises ValueError."""
    found = _USUAL.fullmatch(head, 0, USUAL_BYTES)
    if not found:
        return None
    dtype, count = np.dtype(found[1].decode()), int(found[2])
    _require_end(USUAL_BYTES, count, dtype, size)
    return dtype, count, USUAL_BYTES
