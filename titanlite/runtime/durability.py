"""Files and folders that appear complete or not at all, also after a power failure. All functions raise OSError."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".incomplete"
"""Suffix of files and folders that are being written."""


@contextmanager
def appears_complete(path: Path, temporary: Path | None = None, *, synced: bool = True) -> Iterator[Path]:
    """Yield a temporary path for a file or folder, which is renamed to `path` at the end and removed after an error.

    Readers, and a start after an interruption, find the old content or the new. temporary: default: `path` with the
    suffix PARTIAL. A file left there is removed; so is a link or a pipe, which is neither followed nor opened. synced:
    whether content and name are on the disk at the end; without it, a power failure may leave an incomplete file.
    """
    temporary = path.with_name(path.name + PARTIAL) if temporary is None else temporary
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        publish(temporary, path, synced=synced)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes, temporary: Path | None = None, *, synced: bool = True) -> None:
    """Write a file by `appears_complete`. Errors name the file."""
    with appears_complete(path, temporary, synced=synced) as new:
        write_file(new, content, synced=False)


def publish(temporary: Path, path: Path, *, synced: bool = True) -> None:
    """Rename a complete file or folder to `path`. synced: see appears_complete."""
    if synced:
        for each in (*temporary.rglob("*"), temporary):
            sync_path(each)
    temporary.replace(path)
    if synced:
        sync_path(path.parent)


def write_file(path: Path, content: bytes, *, synced: bool = True) -> None:
    """Write a new file, which must not exist. The error names the file."""
    try:
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            if synced:
                os.fsync(file.fileno())
    except OSError as error:  # names the file only if open() failed
        raise OSError(error.errno, error.strerror, str(path)) from None


def sync_path(path: Path) -> None:
    """Return once a file, or the names in a folder, are on the disk. The error names the path."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)
