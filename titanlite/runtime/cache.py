"""Caches: on disk, built by one process for all; and in memory, least recently used entries evicted first."""

import errno
import fcntl
import grp
import hashlib
import json
import os
import pwd
import shutil
import stat
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import xxhash

from titanlite.runtime.durability import PARTIAL, appears_complete
from titanlite.runtime.environment import expand_home
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import NotRegularError, open_regular, open_to_append
from titanlite.runtime.logging import log
from titanlite.runtime.waiting import waiting

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

HASHES = "hashes.xxh3"
"""In each folder of built_once: hash and name of each other file, in lines as those of the program xxh128sum."""

SMALL_BYTES = 2**20
"""Files up to this size are hashed at each use: that is as fast as to look up whether they were verified."""


def cache_folder() -> Path:
    """Return $TITANLITE_CACHE, else $XDG_CACHE_HOME/titanlite, else ~/.cache/titanlite. It may not exist yet.

    Raises UserError if a home folder is unknown. Rank 0 warns once if other users may write to it.
    """
    folder = _named_cache_folder()
    if os.environ.get("RANK", "0") == "0":
        _warn_if_others_write(folder)
    return folder


@lru_cache
def _warn_if_others_write(folder: Path) -> None:
    try:
        found = folder.stat()
    except OSError:
        return  # it does not exist yet, or an access to it reports the error
    if found.st_uid not in (0, os.geteuid()):
        fault = f"belongs to another user (uid {found.st_uid})"
    elif found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_group_of_one(found)):
        fault = "may be written to by other users"
    else:
        return
    log.warning(
        "The cache folder %s %s, who can change what a run reads: use it only if you trust all who write there, "
        "or set TITANLITE_CACHE to a folder of your own",
        folder,
        fault,
    )


def _is_group_of_one(found: os.stat_result) -> bool:
    """Whether the group is that of the owner alone, as most systems make one for each user."""
    try:
        group, owner = grp.getgrgid(found.st_gid), pwd.getpwuid(found.st_uid)
    except KeyError:
        return False
    return group.gr_name == owner.pw_name and not set(group.gr_mem) - {owner.pw_name}


def _named_cache_folder() -> Path:
    own = os.environ.get("TITANLITE_CACHE")
    if own:
        try:
            return Path(expand_home(own))
        except UserError as error:
            raise UserError(f"TITANLITE_CACHE={error}") from None
    shared = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(shared) if shared else Path.home() / ".cache") / "titanlite"
    except RuntimeError:  # a container may have neither HOME nor an entry in /etc/passwd
        raise UserError("this user has no home folder: set TITANLITE_CACHE to a folder for caches") from None


def content_key(facts: Any) -> str:
    """Hash `facts`, a JSON value, to 32 hex digits."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def cached_folder(kind: str, facts: Any) -> Path:
    """The folder in the cache, below `kind`, of what `facts`, a JSON value, decide. It may not exist yet."""
    return cache_folder() / kind / content_key(facts)


def file_facts(files: list[Path]) -> list[tuple[str, int, int, int]]:
    """Return (path, size in bytes, modification time in ns, inode) of each file, as facts of a content_key."""
    found = [(file, os.stat(file)) for file in files]
    return [(str(file), each.st_size, each.st_mtime_ns, each.st_ino) for file, each in found]


def hash_of(path: Path) -> str:
    """The xxh3-128 hash of a file, in hex. Raises OSError."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def has_hash(path: Path, expected: str) -> bool:
    """Whether a file has this hash. Raises OSError.

    The cache folder remembers large files that have it, by file_facts, in a marker that is not empty. One process at a
    time hashes such a file, and the others wait for its marker.
    """
    if path.stat().st_size <= SMALL_BYTES:
        return hash_of(path) == expected
    marker = cached_folder("verified", ["hash", file_facts([path.absolute()]), expected])
    with ExitStack() as stack:
        if _has_content(marker):
            return True
        with suppress(OSError):  # a cache that cannot be written or locked costs time only
            marker.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(marker, f"verify {path}"))
            if _has_content(marker):
                return True
        if hash_of(path) != expected:
            return False
        with suppress(OSError), open_to_append(marker) as file:
            file.write(b"verified\n")
    return True


def _has_content(marker: Path) -> bool:
    try:
        return marker.stat().st_size > 0
    except OSError:
        return False


def built_once(folder: Path, what: str, build: Callable[[Path], None]) -> Path:
    """Return `folder`, filled with files by `build(temporary folder)` unless it exists already.

    If several processes call this concurrently, one builds and the others wait. A rename publishes the complete folder.
    If a builder is killed, its lock is released and the next builder removes its leftovers. A folder with a damaged
    file is built again, with a warning. Raises UserError if the folder cannot be written. what: description of the
    content, for messages.
    """
    if _is_intact(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(folder.name + ".lock"), f"build {what}"):
            if not _is_intact(folder):
                if folder.is_dir():
                    log.warning("%s in %s is damaged and is built again", what, folder)
                    shutil.rmtree(folder)
                shutil.rmtree(folder.with_name(folder.name + PARTIAL), ignore_errors=True)
                with appears_complete(folder) as temporary:
                    temporary.mkdir()
                    build(temporary)
                    lines = [f"{hash_of(path)}  {path.name}\n" for path in temporary.iterdir()]
                    (temporary / HASHES).write_text("".join(lines))
    except OSError as error:
        place = "with more space" if error.errno == errno.ENOSPC else "that is writable and supports file locks"
        raise UserError(
            f"cannot build {what} in {folder.parent}: {error}; set the environment variable "
            f"TITANLITE_CACHE to a folder {place}"
        ) from error
    return folder


def _is_intact(folder: Path) -> bool:
    """Whether the files of a folder of built_once, and no others, have their hashes; False if it does not exist."""
    try:
        with open_regular(folder / HASHES) as file:
            hashes = {name: digest for digest, name in (line.split("  ") for line in file.read().decode().splitlines())}
        names = set(os.listdir(folder)) - {HASHES}
        return hashes.keys() == names and all(has_hash(folder / name, hashes[name]) for name in names)
    except (OSError, ValueError):
        return False


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`; the system releases it if the process dies. what: the locked work.

    Raises OSError, also for a pipe in place of the file.
    """
    try:
        file = open_to_append(path)
    except NotRegularError as error:
        raise OSError(f"{path} is {error}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with waiting(lambda: f"another process to {what}; it holds {path}: end it if it hangs"):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Recent(Generic[K, V]):
    """An LRU cache: the sizes of its values sum to at most `limit`; the last used value is always kept."""

    def __init__(self, limit: int, size: Callable[[V], int]) -> None:
        self._limit = limit
        self._size = size
        self._total = 0
        self._values: OrderedDict[K, V] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of `key`, made by `make()` if it is not cached."""
        if key not in self._values:
            self._values[key] = value = make()
            self._total += self._size(value)
            while self._total > self._limit and len(self._values) > 1:
                _, oldest = self._values.popitem(last=False)
                self._total -= self._size(oldest)
        self._values.move_to_end(key)
        return self._values[key]
