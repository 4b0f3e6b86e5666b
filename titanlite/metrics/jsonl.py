"""metrics.jsonl and the other files of rows: written, cleaned before a resumed run appends, and read by key."""

import io
import json
import math
import os
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titanlite.metrics.records import PREFIX, LogRecord, is_validation
from titanlite.runtime.durability import replace_file
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import no_link, open_regular
from titanlite.runtime.json_files import JsonError, parse_json
from titanlite.runtime.logging import log


class JsonlLogger:
    """Writes the rows of one file: a JSON object per line, floats in full precision (reading returns the same float).

    JSON has no numbers for non-finite values: these are the strings "NaN", "Infinity" and "-Infinity", which every JSON
    reader accepts and `float` converts. Each line is a single write to a file opened for appending, so readers always
    see complete lines, also after a crash; only a full disk or a power failure can truncate a line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = open(path, "ab", buffering=0, opener=no_link)  # noqa: SIM115
            self._identity = os.fstat(self._file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from None

    def write(self, record: LogRecord) -> None:
        """Append the record's rows, if this is their file. Raises UserError if the file system fails."""
        if self._path.name != record.FILE:
            return
        line = "".join(f"{json_line(row)}\n" for row in record.rows()).encode()
        try:
            if not os.path.samestat(os.stat(self._path), self._identity):
                raise UserError(
                    f"{self._path} was replaced during the run; start again: with checkpoints, the run resumes from "
                    "the latest one"
                )
            while line:
                line = line[self._file.write(line) :]  # a write may be partial if the disk is nearly full
        except FileNotFoundError:
            raise UserError(
                f"{self._path} was deleted or its folder renamed during the run; restore job.dump_folder and start "
                "again: with checkpoints, the run resumes from the latest one there"
            ) from None
        except OSError as error:
            raise UserError(
                f"cannot write {self._path}: {error.strerror}; the record of step {record.step} is lost; free space, "
                "or fix the file system, and start again: with checkpoints, the run resumes from the latest one"
            ) from None

    def close(self) -> None:
        self._file.close()


def json_line(row: Mapping[str, Any]) -> str:
    """The row as strict JSON on one line."""
    # A non-finite float becomes the string that json would write without quotes.
    values = {
        key: json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }
    return json.dumps(values, allow_nan=False)


def keep_rows(path: Path, last_step: int) -> None:
    """Keep exactly the rows of steps up to `last_step` in the file at `path`, in order, one per step and kind.

    A step may have a second row, of the validation after it, and a row per prompt. Removed are: rows of later steps,
    which the resumed run writes again; lines that are not valid rows (truncated by a power failure or a full disk);
    and, of several rows of the same step and kind, all but the last. The bytes of other rows do not change. The number
    of removed rows and the reasons are logged.

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
    rows: dict[tuple[int, bool, str], bytes] = {}
    unreadable = later = 0
    for line in lines:
        row = _row_of(line)
        if row is None:
            unreadable += 1
        elif row["step"] > last_step:
            later += 1
        else:
            key = row["step"], is_validation(row), str(row.get("prompt"))
            rows.pop(key, None)
            rows[key] = line
    removed = {
        f"of steps after {last_step}, from which the run resumes": later,
        "replaced by a later row of the same step": len(lines) - unreadable - later - len(rows),
        "unfinished or unreadable": unreadable,
    }
    return b"".join(rows[key] + b"\n" for key in sorted(rows, key=lambda key: key[0])), removed


def has_validation(path: Path, step: int) -> bool:
    """Whether the file at `path` has a row of the validation after `step`. Raises UserError if it cannot be read."""
    return any(row["step"] == step and is_validation(row) for row in read_rows(path))


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


def read_lines(path: Path, row: Any) -> list[Any]:
    """The rows of the TypedDict `row` in the file at `path`, in order, without damaged lines; [] if it does not exist.
    Raises UserError if it cannot be read."""
    found = []
    for line in _content(path).splitlines():
        with suppress(JsonError):
            values = parse_json(line, row)
            found.append({key: values[key] for key in row.__annotations__})
    return found


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows in the file at `path`, in order; [] if it does not exist. Raises UserError if it cannot be read."""
    return [row for row in map(_row_of, _content(path).splitlines()) if row is not None]


def last_row(path: Path) -> dict[str, Any]:
    """The last row of a step in the file at `path`; {} without one. Raises UserError if it cannot be read."""
    rows = (_row_of(line) for line in reversed(_content(path).splitlines()))
    return next((row for row in rows if row is not None and not is_validation(row)), {})


_DECODER = json.JSONDecoder()  # json.loads with options would build one per line


def _row_of(line: bytes) -> dict[str, Any] | None:
    """The row in a line; None if it is not a valid row. A truncated row is invalid JSON: it lacks its last brace.

    parse_json would take five times as long.
    """
    try:
        row = _DECODER.decode(line.decode())
    except (ValueError, RecursionError):
        return None
    is_row = type(row) is dict and type(row.get("step")) is int and 0 < row["step"] < 2**63
    return row if is_row else None


@dataclass(frozen=True)
class Series:
    """The values of one key. steps: ascending. values: at these steps; NaN and infinities where the rows have them."""

    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]


_Columns = dict[str, tuple["array[int]", "array[float]"]]
_NON_FINITE = {text: float(text) for text in ("NaN", "Infinity", "-Infinity")}


def read_series(path: Path) -> dict[str, Series]:
    """The numbers in the file at `path` by key, also while a run writes it; {} if it does not exist.

    A row of an earlier step than the row before it supersedes all later steps. Lines that are not valid rows are left
    out, and their number is logged, except that of an unfinished last line. A million rows take about ten seconds.
    Raises UserError if the file cannot be read.
    """
    columns: _Columns = {}
    last = {False: 0, True: 0}  # the last step, by whether the row is of a validation
    unreadable = 0
    for line in io.BytesIO(_content(path)):
        row = _row_of(line)
        if row is None:
            unreadable += line.endswith(b"\n")
            continue
        step, kind = row.pop("step"), is_validation(row)
        if step <= last[kind]:
            _remove_from(columns, step, PREFIX if kind else "")
        last[kind] = step
        for key, value in row.items():
            number = value if type(value) is float else _number(value)
            if number is not None:
                if key not in columns:
                    columns[key] = array("q"), array("d")
                columns[key][0].append(step)
                columns[key][1].append(number)
    if unreadable:
        log.warning("%s: %d lines are not valid rows and were left out", path, unreadable)
    return {
        key: Series(np.frombuffer(steps, np.int64), np.frombuffer(values))
        for key, (steps, values) in columns.items()
        if steps
    }


def _number(value: object) -> float | None:
    """The number that a value of a row means, if any."""
    if type(value) is int:
        return float(value) if abs(value) < 2**1000 else None
    return _NON_FINITE.get(value) if type(value) is str else None


def _remove_from(columns: _Columns, first: int, prefix: str) -> None:
    """Remove the values of steps from `first` on, of all keys with the prefix."""
    for key, (steps, values) in columns.items():
        if key.startswith(prefix):
            begin = bisect_left(steps, first)
            del steps[begin:], values[begin:]
