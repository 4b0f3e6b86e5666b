"""The report as Markdown."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from gpu_checks.rows import Row


def markdown(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    """The report: a summary, the failed cases, and a table per check. rows: sorted by check."""
    counts = Counter(row.status for row in rows)
    summary = ", ".join(f"{counts[status]} {status}" for status in ("failed", "passed", "measured", "skipped"))
    lines = ["# GPU check", "", f"{', '.join(f'{key} {value}' for key, value in about.items())}", "", f"{summary}."]
    for row in rows:
        if row.status == "failed":
            lines.append(f"- failed: {row.check}: {row.name}: {row.text}")
    for check, group in groupby(rows, key=lambda row: row.check):
        lines += ["", f"## {check}", "", "| case | result | |", "|---|---|---|"]
        lines += [f"| {cell(row.name)} | {row.status} | {cell(row.text)} |" for row in group]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """The text for a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")
