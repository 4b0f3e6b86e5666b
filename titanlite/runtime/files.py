"""Open and read regular files that others may have replaced or shortened, without waiting; names that others chose."""

import errno
import io
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from titanlite.runtime.errors import UserError

_UNSAFE = re.compile(r"(?:\A|/)\.{0,2}(?:/|\Z)|[\\\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

_KINDS = {stat.S_IFIFO: "pipe", stat.S_IFCHR: "device", stat.S_IFBLK: "device", stat.S_IFSOCK: "socket"}


class NotRegularError(OSError):
    """A pipe, device or socket in place of a file."""


def is_safe_name(name: str) -> bool:
    """Whether a relative name, which others chose, is one line of text and leads to a place below any folder.

    Its parts are not "", "." or "..", and it has no backslash, control character, line separator or unpaired surrogate.
    """
    return not _UNSAFE.search(name)


def path_below(folder: Path, name: str) -> Path:
    """The path of a relative name, which others chose, in `folder`. Raises UserError if it would lead elsewhere."""
    if not is_safe_name(name):
        raise UserError(f"{name!r} is not the name of a file below {folder}: it is neither read nor written")
    return folder / name


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file for reading. Raises OSError; NotRegularError for a pipe or device.

    Never waits: opening a pipe would block until another process writes into it.
    """
    _require_regular(path, os.stat(path).st_mode)  # opening a device can have effects
    return open(_open(path, os.O_RDONLY), "rb")


def open_to_append(path: str | os.PathLike[str]) -> io.BufferedRandom:
    """Open a regular file for reading and appending; it is created if missing. Errors, and no waits, as open_regular"""
    with suppress(FileNotFoundError):
        _require_regular(path, os.stat(path).st_mode)
    return open(_open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b")


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
