"""metrics.jsonl: the numbers of a run that resume, reports and other programs read."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlite.metrics.experts import ExpertsRecord
from titanlite.metrics.records import LogRecord
from titanlite.metrics.samples import SamplesRecord
from titanlite.runtime.durability import replace_file
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import open_regular
from titanlite.runtime.json_files import JsonError, parse_json


class JsonlSink:
    """Writes one JSON object per line, floats in full precision (reading returns the same float).

    JSON has no numbers for non-finite values: these are the strings "NaN", "Infinity" and "-Infinity", which every JSON
    reader accepts and `float` converts. Each line is a single write to a file opened for appending, so readers always
    see complete lines, also after a crash; only a full disk or a power failure can truncate a line.
    """

    def __init__(self, path: Path, *kinds: type[LogRecord]) -> None:
        self._path = path
        self._kinds = kinds
        try:
            self._file = path.open("ab", buffering=0)
            self._identity = os.fstat(self._file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None

    def write(self, record: LogRecord) -> None:
        """Append the record's lines, if it is of a kind of this file. Raises UserError if the file system fails."""
        if not isinstance(record, self._kinds):
            return
        lines = record.rows() if isinstance(record, SamplesRecord | ExpertsRecord) else [record.row()]
        line = "".join(f"{json_line(row)}\n" for row in lines).encode()
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


def keep_lines(path: Path, row: Any, last_step: int) -> None:
    """Remove rows of later steps, and damaged ones, from a file of rows of the TypedDict `row`. Raises UserError if it
    cannot be rewritten."""
    try:
        with open_regular(path) as file:
            lines = file.read().splitlines(keepends=True)
        kept = [line for line in lines if _step(line, row) <= last_step]
        if kept != lines:
            replace_file(path, b"".join(kept))
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"cannot rewrite {path}: {error.strerror or error}: rename or remove it") from None


def _step(line: bytes, row: Any) -> float:
    try:
        found: float = parse_json(line, row)["step"]
    except JsonError:
        return math.inf
    return found
