"""The files of the report: each row as soon as it is known, and the page that is made from them."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_checks.rows import Row, markdown, page

ROWS, PAGE = "gpu_check.jsonl", "gpu_check.md"


class Report:
    """Writes ROWS and PAGE into a folder. about: facts of all rows.

    ROWS has a JSON object per line: `about`, then the rows, and the seconds of each part. A program that is killed
    leaves all rows so far, and the page of the stages that have ended.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.page = folder / PAGE
        self.has_failed = False
        self._rows = folder / ROWS
        self._rows.write_text("")
        self._add({"about": dict(about)})

    def add(self, row: Row) -> None:
        """Print a row and write it."""
        print(f"{row.status:<9} {row.check}: {row.name}: {row.text}", flush=True)
        self.has_failed |= row.status == "failed"
        self._add(asdict(row))

    def add_part(self, name: str, seconds: float) -> None:
        self._add({"part": name, "seconds": round(seconds, 1)})

    def add_facts(self, **facts: Any) -> None:
        """Facts that are known at the end."""
        self._add({"about": facts})

    def _add(self, value: Mapping[str, Any]) -> None:
        with self._rows.open("a") as file:
            file.write(json.dumps(value) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def write(self) -> str:
        """Write the page from the rows so far; returns its first part."""
        about: dict[str, Any] = {}
        rows, parts = [], []
        for line in self._rows.read_text().splitlines():
            value = json.loads(line)
            if "about" in value:
                about |= value["about"]
            elif "part" in value:
                parts.append(f"{value['part']} {value['seconds']}")
            else:
                rows.append(Row(**value))
        rows.sort(key=lambda row: int(row.check.partition(" ")[0]))
        text = f"{markdown(rows, about)}\nSeconds of each part, with its start: {', '.join(parts)}.\n"
        self.page.write_text(text)
        return page(rows, about)
