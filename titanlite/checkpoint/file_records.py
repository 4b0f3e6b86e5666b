"""The files of a checkpoint: what is recorded of each, and the check against it. Does not import DCP, which is slow."""

import errno
import stat
from dataclasses import dataclass
from pathlib import Path

from titanlite.runtime.cache import hash_of
from titanlite.runtime.durability import write_file

HASH = "xxh3-128"
METADATA_FILE = ".metadata"


class InvalidCheckpointError(Exception):
    """A checkpoint is incomplete or corrupted. The text is one line: file, the rank that wrote it, and the damage."""


@dataclass(frozen=True)
class FileRecord:
    """A written file. rank: the rank that wrote it. hash: HASH, in hex."""

    rank: int
    bytes: int
    hash: str


def write_recorded(path: Path, content: bytes) -> FileRecord:
    """Write a new small file, from rank 0, and sync it to disk. Raises OSError."""
    write_file(path, content)
    return FileRecord(0, len(content), hash_of(path))


def check_file(folder: Path, name: str, record: FileRecord, *, content: bool = True) -> None:
    """Check a file against its record. Raises InvalidCheckpointError if it differs, OSError if it cannot be read.

    content: whether to check the hash, too, and not only the size.
    """
    where = f"{name} (written by rank {record.rank})"
    try:
        facts = (folder / name).stat()
        size = facts.st_size
        if not stat.S_ISREG(facts.st_mode):
            raise InvalidCheckpointError(f"{where} is not a regular file")
        if size != record.bytes:
            raise InvalidCheckpointError(f"{where} has {size:,} bytes instead of {record.bytes:,}")
        if content and hash_of(folder / name) != record.hash:
            raise InvalidCheckpointError(f"{where} has changed since it was written: its {HASH} differs")
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
            raise InvalidCheckpointError(f"{where} is missing") from None
        if error.errno == errno.EIO:
            raise InvalidCheckpointError(f"{where} cannot be read: {error.strerror}") from None
        raise
