"""Open and read regular files that others may have replaced or shortened, without waiting."""

import errno
import io
import os
import stat
from contextlib import suppress

_KINDS = {stat.S_IFIFO: "pipe", stat.S_IFCHR: "device", stat.S_IFBLK: "device", stat.S_IFSOCK: "socket"}


class NotRegularError(OSError):
    """A pipe, device or socket in place of a file."""


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file for reading. Raises OSError; NotRegularError for a pipe or device.

    Never waits: opening a pipe would block until another process writes into it.
    """
    _require_regular(path, os.stat(path).st_mode)  # opening a device can have effects
    return open(_open(path, os.O_RDONLY), "rb")


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
    return _open(path, flags | os.O_NOFOLLOW)


def _open(path: str | os.PathLike[str], flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _require_regular(path, os.fstat(descriptor).st_mode)  # it may have been replaced meanwhile
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


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
