"""metrics.jsonl and the other files of rows: written, cleaned before a resumed run appends, and read by key."""

import io
import json
import math
import os
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from titanlite.metrics.records import PREFIX, LogRecord, is_validation
from titanlite.runtime import row_files
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import no_link, open_regular
from titanlite.runtime.json_files import JsonError, parse_json
from titanlite.runtime.logging import log
from titanlite.runtime.row_files import (
    RowIndex,
    Rows,
    cannot_read,
    find_rows,
    has_begun_line,
    lines_from_end,
    lines_of,
    row_of,
    rows_at,
)


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
            self._index = RowIndex(path, kind_of)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from None

    def write(self, record: LogRecord) -> None:
        """Append the record's rows, if this is their file. Raises UserError if the file system fails."""
        if self._path.name != record.FILE:
            return
        rows = record.rows()
        lines = [f"{json_line(row)}\n".encode() for row in rows]
        line = b"".join(lines)
        try:
            if not os.path.samestat(os.stat(self._path), self._identity):
                raise UserError(
                    f"{self._path} was replaced during the run; start again: with checkpoints, the run resumes from "
                    "the latest one"
                )
            while line:
                line = line[self._file.write(line) :]  # a write may be partial if the disk is nearly full
            self._index.note((row["step"], kind_of(row), len(each)) for row, each in zip(rows, lines, strict=True))
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
        self._index.close()


def json_line(row: Mapping[str, Any]) -> str:
    """The row as strict JSON on one line."""
    # A non-finite float becomes the string that json would write without quotes.
    values = {
        key: json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }
    return json.dumps(values, allow_nan=False)


def kind_of(row: Mapping[str, Any]) -> int:
    """The kind of a row, see KindOf: a step may have a second row, of the validation after it, and a row per prompt."""
    prompt = str(row.get("prompt"))
    number = 0 if prompt == "None" else int.from_bytes(blake2b(prompt.encode(), digest_size=7).digest())
    return 2 * number + is_validation(row)


VALIDATION = 1
"""The kind of validation rows."""


def keep_rows(path: Path, last_step: int) -> None:
    """Keep exactly the rows of steps up to `last_step`, in order, one per step and kind: see row_files.keep_rows."""
    row_files.keep_rows(path, last_step, kind_of)


def has_validation(path: Path, step: int) -> bool:
    """Whether the file at `path` has a row of the validation after `step`. Raises UserError if it cannot be read."""
    with _found_rows(path) as (rows, _):
        return bool(((rows.step == step) & (rows.kind % 2 == VALIDATION)).any())


@contextmanager
def _found_rows(path: Path) -> Iterator[tuple[Rows, BinaryIO]]:
    """The places of the rows of the file at `path`, and the file; no rows if it does not exist. Raises UserError if it
    cannot be read."""
    try:
        with open_regular(path) as file:
            yield find_rows(file, path, kind_of), file
    except FileNotFoundError:
        none = np.zeros(0, dtype=np.int64)
        yield Rows(none, none, none, none, 0, 0, is_indexed=False), io.BytesIO()
    except OSError as error:
        raise UserError(cannot_read(path, error)) from None


def read_lines(path: Path, row: Any) -> list[Any]:
    """The rows of the TypedDict `row` in the file at `path`, in order, without damaged lines; [] if it does not exist.
    Raises UserError if it cannot be read."""
    return [*_of_type(lines_of(path), row)]


def last_line(path: Path, row: Any) -> Any:
    """The last one of read_lines; None without one."""
    return next(_of_type(lines_from_end(path), row), None)


def _of_type(lines: Iterable[bytes], row: Any) -> Iterator[Any]:
    for line in lines:
        with suppress(JsonError):
            values = parse_json(line, row)
            yield {key: values[key] for key in row.__annotations__}


def read_rows(path: Path, steps: range | None = None) -> list[dict[str, Any]]:
    """The rows in the file at `path`, in order; [] if it does not exist. steps: of these only. Raises UserError if it
    cannot be read."""
    if steps is None:
        return [row for row in map(row_of, lines_of(path)) if row is not None]
    with _found_rows(path) as (rows, file):
        return [*rows_at(file, rows, np.flatnonzero(np.isin(rows.step, steps)))]


def value_at_end(path: Path, key: str, step: int) -> float | None:
    """The number of `key` after `step`; None if this is not the last step in the file at `path`, or has no such number.
    Raises UserError if the file cannot be read."""
    columns: _Columns = {}
    with _found_rows(path) as (rows, file):
        if len(rows) and rows.step[-1] == step:
            for row in rows_at(file, rows, np.flatnonzero(rows.step == step)):
                _add_row(columns, row, (key,))
    return columns[key][1][-1] if key in columns else None


def last_row(path: Path) -> dict[str, Any]:
    """The last row of a step in the file at `path`; {} without one. Raises UserError if it cannot be read."""
    rows = map(row_of, lines_from_end(path))
    return next((row for row in rows if row is not None and not is_validation(row)), {})


@dataclass(frozen=True)
class Series:
    """The values of one key. steps: ascending. values: at these steps; NaN and infinities where the rows have them."""

    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]


_Columns = dict[str, tuple["array[int]", "array[float]"]]
_NON_FINITE = {text: float(text) for text in ("NaN", "Infinity", "-Infinity")}


def read_series(path: Path, keys: Collection[str] | None = None) -> dict[str, Series]:
    """The numbers in the file at `path` by key, also while a run writes it; {} if it does not exist. keys: of these
    only, since those of many sources take gigabytes.

    A row of an earlier step than the row before it supersedes all later steps. Lines that are not valid rows are left
    out, and their number is logged, except that of an unfinished last line. A million rows take about ten seconds.
    Raises UserError if the file cannot be read.
    """
    columns: _Columns = {}
    last = {False: 0, True: 0}  # the last step, by whether the row is of a validation
    unreadable = 0
    for line in lines_of(path):
        row = row_of(line)
        if row is None:
            unreadable += line.endswith(b"\n")
            continue
        kind = is_validation(row)
        if row["step"] <= last[kind]:
            _remove_from(columns, row["step"], PREFIX if kind else "")
        last[kind] = row["step"]
        _add_row(columns, row, keys)
    if unreadable:
        log.warning("%s: %d lines are not valid rows and were left out", path, unreadable)
    return _series(columns)


MOST_PARSED_BYTES = 128 * 2**20
"""Bytes of rows that read_history parses of a longer file, twice as many if most rows are validations."""


class History(NamedTuple):
    """The numbers of a run by key. note: which rows they are of; "" if of all."""

    series: dict[str, Series]
    note: str = ""


def read_history(path: Path) -> History:
    """As read_series, but of a file of more than MOST_PARSED_BYTES only some rows. Parsing takes 10 ns per byte."""
    with suppress(OSError):  # read_series explains it
        if path.stat().st_size > MOST_PARSED_BYTES:
            return _read_some(path)
    return History(read_series(path))


def _read_some(path: Path) -> History:
    columns: _Columns = {}
    with _found_rows(path) as (rows, file):
        if unreadable := rows.others - has_begun_line(file, rows):
            log.warning("%s: %d lines are not valid rows and were left out", path, unreadable)
        chosen, notes = [], []
        for name in ("row", "validation"):
            numbers = np.flatnonzero((rows.kind % 2 == VALIDATION) == (name == "validation"))
            later = np.minimum.accumulate(rows.step[numbers][::-1])[::-1]  # of a row and those after it
            numbers = numbers[np.append(rows.step[numbers][:-1] < later[1:], True)[: len(numbers)]]
            size = int((rows.end[numbers] - rows.begin[numbers]).sum())
            distance = -(-size // MOST_PARSED_BYTES) or 1
            chosen += [numbers[::distance], numbers[-1:]]
            notes.append(f"one {name} in {distance}, the first and the last" if distance > 1 else f"all {name}s")
        for row in rows_at(file, rows, np.unique(np.concatenate(chosen))):
            _add_row(columns, row)
    return History(_series(columns), f"of {'; '.join(notes)}")


def _add_row(columns: _Columns, row: dict[str, Any], keys: Collection[str] | None = None) -> None:
    step = row.pop("step")
    for key, value in row.items() if keys is None else [(key, row[key]) for key in keys if key in row]:
        number = value if type(value) is float else _number(value)
        if number is not None:
            if key not in columns:
                columns[key] = array("q"), array("d")
            columns[key][0].append(step)
            columns[key][1].append(number)


def _series(columns: _Columns) -> dict[str, Series]:
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
