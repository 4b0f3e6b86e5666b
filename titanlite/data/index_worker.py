"""A worker process of titanlite.data.indexing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from titanlite.data.indexing import Scanned, scan, write_pieces
from titanlite.data.kinds import open_source
from titanlite.data.processes import Arrays, run_worker
from titanlite.data.sources.base import TextSource
from titanlite.data.sources.config import SourceConfig
from titanlite.runtime.errors import UserError


def scanned_parts(
    requests: Iterator[Any], *, source: dict[str, Any], max_piece_bytes: int
) -> Iterator[tuple[Scanned, Arrays]]:
    """Write the part of each request. source: its configuration."""
    opened = open_source(TypeAdapter(SourceConfig).validate_python(source))
    assert isinstance(opened, TextSource), "only text has an index"
    for request in requests:
        files = {number: Path(file) for number, file in request["files"]}
        try:
            with open(request["out"], "wb") as out:
                scanned = write_pieces(scan(opened, files, max_piece_bytes), out)
        except OSError as error:
            remedy = "set the environment variable TITANLITE_CACHE to a folder with more space"
            raise UserError(f"cannot write {request['out']}: {error.strerror}; {remedy}") from error
        yield scanned, {}


if __name__ == "__main__":
    run_worker(scanned_parts)
