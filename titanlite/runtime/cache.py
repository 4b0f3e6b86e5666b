"""What is computed once: on disk, by one process for all; and in memory, as long as there is room."""

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from titanlite.runtime.errors import UserError

logger = logging.getLogger("titanlite")

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def cache_folder() -> Path:
    """$TITANLITE_CACHE, else $XDG_CACHE_HOME/titanlite, else ~/.cache/titanlite. It need not exist yet."""
    own = os.environ.get("TITANLITE_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "titanlite"


def content_key(facts: Any) -> str:
    """32 hex digits that change with any of `facts` (what JSON can hold)."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def file_facts(files: list[Path]) -> list[tuple[str, int, int]]:
    """(path, size in bytes, modification time in ns) of each file: what a key of their content consists of."""
    stats = [(file, os.stat(file)) for file in files]
    return [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats]


def built_once(folder: Path, what: str, build: Callable[[Path], None]) -> Path:
    """`folder`, filled by `build(temporary folder)` unless it exists already.

    Of all processes of all ranks that call this at once, one builds and the others wait. The folder appears by one
    rename, complete or not at all; a builder that is killed loses its lock, and the next one clears up behind it.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock"), what):
            if not folder.is_dir():
                temporary = folder.with_name(folder.name + ".incomplete")
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
                build(temporary)
                _sync(temporary)
                os.rename(temporary, folder)
    except OSError as error:
        raise UserError(
            f"{what} cannot be built in {folder.parent}: {error}; set the environment variable TITANLITE_CACHE to a "
            "folder that can be written and locked"
        ) from error
    return folder


def _sync(folder: Path) -> None:
    """Wait until the folder's files are on the disk, so that what the rename publishes survives a power cut."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


@contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    """Hold the exclusive lock of the file `path`, which the system takes back when the process dies."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that builds %s", what)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Recent(Generic[K, V]):
    """The values used last, as long as their sizes add up to at most `limit`; the very last one stays in any case."""

    def __init__(self, limit: int, size: Callable[[V], int]) -> None:
        self._limit = limit
        self._size = size
        self._total = 0
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of `key`, made now where it is not remembered."""
        if key not in self._values:
            self._values[key] = value = make()
            self._total += self._size(value)
            while self._total > self._limit and len(self._values) > 1:
                _, oldest = self._values.popitem(last=False)
                self._total -= self._size(oldest)
        self._values.move_to_end(key)
        return self._values[key]
