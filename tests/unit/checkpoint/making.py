"""Minimal checkpoints for tests, and simulated kills at any file operation."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import xxhash

from titanlite.checkpoint.folder import publish, step_folder, writing_folder
from titanlite.checkpoint.manifest import METADATA_FILE, Branch, FileRecord, Manifest, write_manifest


def a_manifest(step: int, files: dict[str, bytes], **changes: Any) -> Manifest:
    """Return the manifest of a checkpoint with these files, written by rank 3. changes: of its fields."""
    records = {name: FileRecord(3, len(data), xxhash.xxh3_128_hexdigest(data)) for name, data in files.items()}
    values: dict[str, Any] = {
        "step": step,
        "content": "full",
        "lineage": (Branch("a1", 0),),
        "counts": {"tokens_seen": 64 * step, "skipped_steps": 0, "by_source": {}, "interval": [0.0, 0.0]},
        "facts": {},
        "config": {},
        "versions": {},
        "created": "2030-01-02T03:04:05Z",
        "files": records,
    }
    return Manifest(**(values | changes))


def write_unpublished(folder: Path, step: int, **changes: Any) -> Path:
    """Write a complete checkpoint under its temporary name; returns its path."""
    path = writing_folder(folder, step)
    path.mkdir(parents=True)
    files = {METADATA_FILE: f"step {step}".encode()}
    (path / METADATA_FILE).write_bytes(files[METADATA_FILE])
    write_manifest(path, a_manifest(step, files, **changes))
    return path


def make(folder: Path, step: int, **changes: Any) -> Path:
    """Publish a checkpoint of one small file; returns its path. changes: of its manifest."""
    write_unpublished(folder, step, **changes)
    publish(folder, step)
    return step_folder(folder, step)


def content_of(folder: Path) -> dict[str, bytes | str]:
    """Return bytes of files, targets of symlinks and "folder", by path relative to `folder`."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        else:
            found[name] = "folder" if path.is_dir() else path.read_bytes()
    return found


class Killed(BaseException):
    """Simulates SIGKILL. Derives from BaseException, so that cleanup handlers do not catch it."""


class Killer:
    """Raises Killed before the n-th operation that it counts, and before all later ones."""

    ends: tuple[type[BaseException], ...] = (Killed,)
    """Exceptions that end what is killed."""
    _left: int | None = None

    def count(self, operation: str) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise Killed(operation)

    @contextmanager
    def at(self, operation: int, killed: list[bool]) -> Iterator[list[bool]]:
        """Kill at `operation`, from 0; the yielded list, `killed`, contains True afterwards if it was reached."""
        self._left = operation
        try:
            yield killed
        except self.ends:
            killed.append(True)
        finally:
            self._left = None


class FileKiller(Killer):
    """Counts operations that change or open files."""

    EVENTS = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.link"})

    def __init__(self) -> None:
        sys.addaudithook(lambda event, _: self.count(event) if event in self.EVENTS else None)


KILLER = FileKiller()  # one for all tests: audit hooks cannot be removed


def kills(folder: Path, least: int) -> Iterator[tuple[Path, AbstractContextManager[list[bool]]]]:
    """For each operation, a folder and a context that kills at it; ends after the first context that does not kill.

    least: the number of operations that there are at least.
    """
    for operation in range(100):
        killed: list[bool] = []
        yield folder / str(operation), KILLER.at(operation, killed)
        if not killed:
            assert operation >= least
            return
    raise AssertionError("more than 100 operations")
