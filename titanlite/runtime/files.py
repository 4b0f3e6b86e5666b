"""Open and read regular files that others may have replaced or shortened, without waiting."""

import errno
import io
import os
import resource
import stat
import threading
from collections import OrderedDict
from contextlib import suppress

KEPT_OPEN = 256
"""Files that OpenFiles keeps open. More would not be faster: a window of a random file is read, then another one."""

_KINDS = {stat.S_IFIFO: "pipe", stat.S_IFCHR: "device", stat.S_IFBLK: "device", stat.S_IFSOCK: "socket"}


class NotRegularError(OSError):
    """A pipe, device or socket in place of a file."""


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file for reading. Raises OSError; NotRegularError for a pipe or device.

    Never waits: opening a pipe would block until another process writes into it.
    """
    _require_regular(path, os.stat(path).st_mode)  # opening a device can have effects
    return open(_open(path, os.O_RDONLY)[0], "rb")


def open_to_append(path: str | os.PathLike[str]) -> io.BufferedRandom:
    """Open a regular file for reading and appending; it is created if missing. Errors, and no waits, as open_regular;
    links are not followed: see no_link."""
    return open(path, "a+b", opener=no_link)


def no_link(path: str, flags: int) -> int:
    """Open a regular file in place of `open`, as its opener. Raises OSError for a link, so that what is written stays
    in the folder, and NotRegularError for a pipe or device. Hard links are files."""
    with suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            raise OSError(errno.ELOOP, f"it is a link to {os.readlink(path)!r}, which is not followed", path)
        _require_regular(path, mode)
    return _open(path, flags | os.O_NOFOLLOW)[0]


def _open(path: str | os.PathLike[str], flags: int) -> tuple[int, os.stat_result]:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _require_regular(path, (found := os.fstat(descriptor)).st_mode)  # it may have been replaced meanwhile
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, found


def _require_regular(path: str | os.PathLike[str], mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise NotRegularError(f"not a regular file but a {_KINDS.get(stat.S_IFMT(mode), 'special file')}")


def read_at(descriptor: int, out: memoryview, position: int) -> int:
    """Fill `out`, which consists of bytes, from byte `position` of a file; return the number of bytes read.

    The number is smaller only if the file ends before. Raises OSError.
    """
    filled = 0
    while filled < len(out):
        count = os.preadv(descriptor, [out[filled:]], position + filled)
        if count == 0:
            break
        filled += count
    return filled


class OpenFile:
    """A descriptor of a regular file, closed with this object. facts: when it was opened."""

    def __init__(self, path: str | os.PathLike[str], *, reads_ahead: bool = True) -> None:
        """Errors, and no waits, as open_regular. reads_ahead: see stop_reading_ahead."""
        _require_regular(path, os.stat(path).st_mode)
        self.descriptor, self.facts = _open(path, os.O_RDONLY)
        if not reads_ahead:
            self.stop_reading_ahead()

    def stop_reading_ahead(self) -> None:
        """Let the system read what is asked for only: of a file of which few parts are needed, it reads twice as much
        otherwise."""
        with suppress(OSError):
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if "facts" in vars(self):
            os.close(self.descriptor)

    def read(self, begin: int, size: int) -> bytes:
        """Bytes from `begin` on, fewer if the file ends before. Raises OSError. A file object would take longer."""
        found = os.pread(self.descriptor, size, begin)
        while len(found) < size and (more := os.pread(self.descriptor, size - len(found), begin + len(found))):
            found += more
        return found


class OpenFiles:
    """Files that are read again and again, by number. At most `limit` stay open: the least recently used are closed,
    and opened again when they are used. At most a quarter of those that the process may open. For any thread."""

    def __init__(self, limit: int = KEPT_OPEN) -> None:
        self.limit = limit
        self._numbers = 0
        self._open: OrderedDict[int, OpenFile] = OrderedDict()  # the last one was used last
        self._changing = threading.Lock()

    def add(self, file: OpenFile) -> int:
        """The number of a new file."""
        with self._changing:
            self._numbers += 1
            self._keep(self._numbers, file)
            return self._numbers

    def get(self, number: int, path: str | os.PathLike[str]) -> OpenFile:
        """The file of this number and path; who reads it keeps the result meanwhile. Raises OSError."""
        with self._changing:
            file = self._open.get(number)
            if file is None:
                self._keep(number, file := OpenFile(path))
            else:
                self._open.move_to_end(number)
            return file

    def _keep(self, number: int, file: OpenFile) -> None:
        self._open[number] = file
        may_open, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = self.limit if may_open < 0 else min(self.limit, may_open // 4)
        while len(self._open) > limit:
            self._open.popitem(last=False)

    def facts(self, number: int, path: str | os.PathLike[str]) -> os.stat_result:
        """Those of now, without opening the file. Raises OSError."""
        file = self._open.get(number)
        return os.stat(path) if file is None else os.fstat(file.descriptor)

    def discard(self, number: int) -> None:
        """Close a file that is not used any more."""
        self._open.pop(number, None)
