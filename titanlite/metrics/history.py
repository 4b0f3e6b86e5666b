"""The rows that earlier starts of a run have left in metrics.jsonl, put in order before a resumed run goes on there."""

import json
import os
from pathlib import Path
from typing import Any

from titanlite.metrics.validation import is_validation
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log


def keep_rows(path: Path, last_step: int) -> None:
    """Leave exactly the rows of steps up to `last_step` in the file at `path`, one per step, in their order.

    A step may have a second row, of the validation after it. A run that continues after `last_step` writes those of
    later steps again. Removed are also lines that are no row (what a power cut or a full disk has left of one) and, of
    several rows of one step and kind, all but the one written last. Rows that stay keep their bytes. A log line says
    how many went, and why.

    Atomic: whoever reads, or starts after a kill at any moment, finds the old file or the new one, whole; the new one
    is on the disk before this returns. A file that is in order, or missing, is not touched. For one process at a time.
    Raises UserError where the file cannot be read or replaced.
    """
    try:
        before = path.read_bytes() if path.exists() else b""
        after, removed = _in_order(before, last_step)
        if after != before:
            _replace(path, after)
    except OSError as error:
        raise UserError(f"cannot read and rewrite {path}: {error.strerror}") from None
    if sum(removed.values()):
        reasons = ", ".join(f"{count} {why}" for why, count in removed.items() if count)
        log.info("%s: %d rows removed: %s", path, sum(removed.values()), reasons)


def _in_order(content: bytes, last_step: int) -> tuple[bytes, dict[str, int]]:
    """The file's new content, and how many lines go for which reason."""
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()  # what follows the last line end
    rows: dict[tuple[int, bool], bytes] = {}
    unreadable = later = 0
    for line in lines:
        row = _row_of(line)
        if row is None:
            unreadable += 1
        elif row["step"] > last_step:
            later += 1
        else:
            rows[row["step"], is_validation(row)] = line
    removed = {
        f"of steps after {last_step}, where the run goes on": later,
        "replaced by a later row of the same step": len(lines) - unreadable - later - len(rows),
        "unfinished or unreadable": unreadable,
    }
    return b"".join(rows[key] + b"\n" for key in sorted(rows)), removed


def has_validation(path: Path, step: int) -> bool:
    """Whether the file at `path` has a row of the validation after `step`."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return any(row["step"] == step and is_validation(row) for row in map(_row_of, lines) if row is not None)


def _row_of(line: bytes) -> dict[str, Any] | None:
    """The row; None where the line is none. A row ends with the only brace that closes: none is torn."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if type(step) is int and step > 0 else None


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
