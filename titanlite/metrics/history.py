"""Cleanup of metrics.jsonl before a resumed run appends to it."""

from pathlib import Path
from typing import Any

from titanlite.metrics.validation import is_validation
from titanlite.runtime.durability import replace_file
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import open_regular
from titanlite.runtime.json_files import JsonError, parse_json
from titanlite.runtime.logging import log


def keep_rows(path: Path, last_step: int) -> None:
    """Keep exactly the rows of steps up to `last_step` in the file at `path`, in order, one per step and kind.

    A step may have a second row, of the validation after it. Removed are: rows of later steps, which the resumed run
    writes again; lines that are not valid rows (truncated by a power failure or a full disk); and, of several rows of
    the same step and kind, all but the last. The bytes of other rows do not change. The number of removed rows and the
    reasons are logged.

    Atomic: readers, and a start after a kill at any moment, find the old file or the complete new one; the new one is
    on disk before this returns. A file that needs no change, or does not exist, is not touched. Not safe for several
    processes at once. Raises UserError if the file cannot be read or replaced.
    """
    before = _content(path)
    after, removed = _in_order(before, last_step)
    try:
        if after != before:
            replace_file(path, after)
    except OSError as error:
        raise UserError(f"cannot rewrite {path}: {error.strerror}") from None
    if sum(removed.values()):
        reasons = ", ".join(f"{count} {why}" for why, count in removed.items() if count)
        log.info("%s: %d rows removed: %s", path, sum(removed.values()), reasons)


def _in_order(content: bytes, last_step: int) -> tuple[bytes, dict[str, int]]:
    """(new content of the file, number of removed lines by reason)."""
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()  # the empty string after the last line end
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
        f"of steps after {last_step}, from which the run resumes": later,
        "replaced by a later row of the same step": len(lines) - unreadable - later - len(rows),
        "unfinished or unreadable": unreadable,
    }
    return b"".join(rows[key] + b"\n" for key in sorted(rows)), removed


def has_validation(path: Path, step: int) -> bool:
    """Whether the file at `path` has a row of the validation after `step`. Raises UserError if it cannot be read."""
    rows = map(_row_of, _content(path).splitlines())
    return any(row["step"] == step and is_validation(row) for row in rows if row is not None)


def _content(path: Path) -> bytes:
    """The content of the file; b"" if it does not exist."""
    try:
        with open_regular(path) as file:
            return file.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}: rename or remove it; the run resumes without earlier rows"
        ) from None


def last_row(path: Path) -> dict[str, Any]:
    """The last row of a step in the file at `path`; {} without one. Raises UserError if it cannot be read."""
    rows = (_row_of(line) for line in reversed(_content(path).splitlines()))
    return next((row for row in rows if row is not None and not is_validation(row)), {})


def _row_of(line: bytes) -> dict[str, Any] | None:
    """The row in a line; None if it is not a valid row. A truncated row is invalid JSON: it lacks its last brace."""
    try:
        row: dict[str, Any] = parse_json(line)
    except JsonError:
        return None
    step = row.get("step")
    return row if type(step) is int and 0 < step < 2**63 else None
