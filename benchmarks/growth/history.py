"""The history of a run: what a resume and a report read of metrics.jsonl with 100 sources, and a resume of a ledger.

`ranks` is the number of rows. Each row of 12.5 kB, as of 100 sources, is written as a run writes it.
"""

import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks.growth.count import Count
from titanlite.data.ledger import Ledger
from titanlite.data.streams import Origin
from titanlite.metrics import jsonl
from titanlite.metrics.jsonl import JsonlLogger, has_validation, keep_rows, last_row, read_history
from titanlite.runtime import row_files

KEYS = tuple(f"by_source/source-{number:03}/{key}" for number in range(100) for key in ("loss", "tokens", "share"))
VALUES = dict.fromkeys(KEYS, 0.12345678901234566)
LOST = 10
"""Rows after the step from which the run resumes."""


class _Row:
    """A record. Every 100th step is that of a validation."""

    FILE = "metrics.jsonl"

    def __init__(self, step: int) -> None:
        self.step = step

    def rows(self) -> list[dict[str, Any]]:
        kind = {"validation/loss": 1.5} if self.step % 100 == 0 else {}
        return [{"step": self.step, **VALUES, **kind}]


def of_history(rows: int) -> Iterator[Count]:
    """A resume from the step of an earlier row, and a report."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        logger = JsonlLogger(path)
        for step in range(1, rows + 1):
            logger.write(_Row(step))  # type: ignore[arg-type]
        logger.close()

        def resume(number: int) -> None:
            keep_rows(path, rows - number * LOST)
            has_validation(path, rows - number * LOST)
            last_row(path)

        yield from _costs("resume, metrics.jsonl", rows, resume)
        yield from _costs("report, metrics.jsonl", rows, lambda _: read_history(path))


def of_ledger(rows: int) -> Iterator[Count]:
    """A resume of the ledger of a data rank."""
    with TemporaryDirectory() as folder:
        ledger = Ledger(folder, data_rank=0, data_degree=1)
        for step in range(1, rows + 1):
            ledger.write(step, range(8), [Origin(0, 0, step, 0)] * 8)
        ledger.close()
        (path,) = Path(folder, "ledger").glob("*.jsonl")
        yield from _costs("resume, ledger", rows, lambda number: keep_rows(path, rows - number * LOST))


def _costs(part: str, rows: int, work: Callable[[int], object]) -> Iterator[Count]:
    """work: called twice, with 1 and 2, since counting memory takes time."""
    parsed, parse = 0, row_files.row_of

    def counted(line: bytes) -> dict[str, Any] | None:
        nonlocal parsed
        parsed += 1
        return parse(line)

    with patch.object(row_files, "row_of", counted), patch.object(jsonl, "row_of", counted):
        begin = time.process_time()
        work(1)
        seconds = time.process_time() - begin
    tracemalloc.start()
    work(2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    yield Count(part, rows, "rows parsed", parsed)
    yield Count(part, rows, "CPU s", seconds)
    yield Count(part, rows, "MiB", peak / 2**20)
