"""Links and pipes in the place of files that a program writes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def planted_at(path: Path, kind: str) -> Iterator[None]:
    """Plant a link to a file, or a pipe with a reader, at `path`. Check afterwards that nothing was written into it."""
    if kind == "link":
        precious = path.with_name("precious")
        precious.write_text("precious")
        path.symlink_to(precious)
        yield
        assert precious.read_text() == "precious"
        return
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without a reader, opening the pipe to write would block
    try:
        yield
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)
