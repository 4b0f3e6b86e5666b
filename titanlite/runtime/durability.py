"""Files and names that survive a power failure: each function returns once they are on the disk. All raise OSError."""

import os
from pathlib import Path


def write_file(path: Path, content: bytes) -> None:
    """Write a new file, which must not exist. The error names the file."""
    try:
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # names the file only if open() failed
        raise OSError(error.errno, error.strerror, str(path)) from None


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically: readers, and a start after an interruption, find the old content or the new.

    A leftover with the temporary name is removed; so is a link or a pipe, which is neither followed nor opened.
    """
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    write_file(temporary, content)
    temporary.replace(path)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync the names in `folder`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
