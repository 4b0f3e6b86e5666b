"""The report as Markdown."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from gpu_checks.rows import Row, Value

COLUMNS = ("tokens/s", "TFLOP/s", "MFU", "GiB", "compile s", "forward ms", "backward ms", "update ms")
"""The numbers of a step in the benchmark, in the order of its table."""


def markdown(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    """The report: a summary, the failed cases, and a table per check. rows: sorted by check."""
    counts = Counter(row.status for row in rows)
    summary = ", ".join(f"{counts[status]} {status}" for status in ("failed", "passed", "measured", "skipped"))
    lines = ["# GPU check", "", f"{', '.join(f'{key} {value}' for key, value in about.items())}", "", f"{summary}."]
    for row in rows:
        if row.status == "failed":
            lines.append(f"- failed: {row.check}: {row.name}: {row.text}")
    for check, grouped in groupby(rows, key=lambda row: row.check):
        group = list(grouped)
        plain = [row for row in group if COLUMNS[0] not in row.values]
        lines += ["", f"## {check}", "", "| case | result | |", "|---|---|---|"]
        lines += [f"| {cell(row.name)} | {row.status} | {cell(row.text)} |" for row in plain]
        steps = [row for row in group if COLUMNS[0] in row.values]
        if steps:
            lines += ["", f"| step | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
        for row in steps:
            numbers = [number(row.values.get(column)) for column in COLUMNS]
            lines.append(f"| {cell(row.name)} | {' | '.join(numbers)} |")
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """The text for a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def number(value: Value) -> str:
    """Three digits, or more of a number above 100; "-" if unknown."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
