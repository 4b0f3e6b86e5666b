"""starts.jsonl: a line per start of a run, for `titanlite report`. Rank 0 writes it."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TypedDict

from titanlite.metrics.config import STARTS_FILE
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import open_regular, open_to_append
from titanlite.runtime.json_files import JsonError, parse_json


@dataclass(frozen=True)
class Started:
    """One start. step: from which it resumed; 0: a new run. time: ISO 8601 with the offset from UTC, before its
    first step. mesh: degree of each axis."""

    step: int
    time: str
    mesh: Mapping[str, int]

    @property
    def moment(self) -> datetime:
        return datetime.fromisoformat(self.time)


class _Line(TypedDict):
    step: int
    time: str
    mesh: dict[str, int]


def note_start(dump_folder: str | Path, step: int, mesh: Mapping[str, int]) -> None:
    """Append a line. Raises UserError."""
    path = Path(dump_folder, STARTS_FILE)
    line = json.dumps(asdict(Started(step, datetime.now().astimezone().isoformat(timespec="seconds"), mesh)))
    try:
        with open_to_append(path) as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # truncated by a full disk or a power failure
                    line = f"\n{line}"
            file.write(f"{line}\n".encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; fix this and start again") from None


def read_starts(dump_folder: Path) -> list[Started]:
    """The starts of a run, in order; [] for a run of an older version. Lines that are not valid are left out.

    Raises OSError.
    """
    try:
        with open_regular(dump_folder / STARTS_FILE) as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    return [start for start in map(_start_of, lines) if start is not None]


def _start_of(line: bytes) -> Started | None:
    try:
        start = Started(**parse_json(line, _Line))
        return start if start.moment.tzinfo is not None and start.step >= 0 else None
    except (JsonError, ValueError):
        return None
