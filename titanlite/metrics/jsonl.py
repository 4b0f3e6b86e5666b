"""metrics.jsonl: the numbers of a run that resume, reports and other programs read."""

import json
import math
import os
from pathlib import Path

from titanlite.metrics.meter import Record
from titanlite.metrics.validation import ValidationRecord
from titanlite.runtime.errors import UserError


class JsonlSink:
    """Writes one JSON object per line, floats in full precision (reading returns the same float).

    JSON has no numbers for non-finite values: these are the strings "NaN", "Infinity" and "-Infinity", which every JSON
    reader accepts and `float` converts. Each line is a single write to a file opened for appending, so readers always
    see complete lines, also after a crash; only a full disk or a power failure can truncate a line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("ab", buffering=0)
            self._identity = os.fstat(self._file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None

    def write(self, record: Record | ValidationRecord) -> None:
        """Append the line. Raises UserError if the file system fails."""
        line = (json_line(record) + "\n").encode()
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


def json_line(record: Record | ValidationRecord) -> str:
    """The record as strict JSON on one line."""
    # A non-finite float becomes the string that json would write without quotes.
    row = {
        key: value if isinstance(value, str) or math.isfinite(value) else json.dumps(value)
        for key, value in record.row().items()
    }
    return json.dumps(row, allow_nan=False)
