"""The rows of the report: what was checked, and how it ended; the report as Markdown."""

import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from posixpath import commonpath
from typing import Any, Literal

from benchmarks.measuring import number
from gpu_checks.promises import promise_of

Value = float | int | str | None
Status = Literal["passed", "failed", "skipped", "measured"]


class SkippedError(Exception):
    """A case cannot run here. The text is the reason."""


class WrongError(Exception):
    """A case has found something wrong. The text says what, and the bound."""


@dataclass(frozen=True)
class Found:
    """The result of a case that has not failed. measured: the case has no bound, so it cannot fail."""

    text: str
    values: Mapping[str, Value] = field(default_factory=dict)
    measured: bool = False


@dataclass(frozen=True)
class Row:
    """A row of the report. check: the section, "1 facts". text: for people; values: the same for programs, in JSON
    types. seconds: that the case took; None if it is unknown."""

    check: str
    name: str
    status: Status
    text: str
    values: Mapping[str, Value] = field(default_factory=dict)
    seconds: float | None = field(default=None, compare=False)


Emit = Callable[[Row], None]
"""Passes a row on as soon as it is known."""


def run_case(check: str, name: str, case: Callable[[], Found]) -> Row:
    """Run a case. An error becomes a failed row, so that the other cases still run."""
    begin = time.perf_counter()

    def row(status: Status, text: str, values: Mapping[str, Value] | None = None) -> Row:
        return Row(check, name, status, text, values or {}, round(time.perf_counter() - begin, 2))

    try:
        found = case()
    except SkippedError as reason:
        return row("skipped", str(reason))
    except WrongError as error:
        return row("failed", str(error))
    except Exception as error:
        return row("failed", describe(error), {"traceback": traceback.format_exc()})
    return row("measured" if found.measured else "passed", found.text, found.values)


def describe(error: BaseException) -> str:
    """The type and the first lines of the message, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{' ...' if len(text) > 300 else ''}"


def require_errors(errors: dict[str, float], bounds: dict[str, float]) -> Found:
    """Compare relative errors with their bounds, by name. Raises WrongError with all that exceed theirs, or are NaN."""
    assert errors, "nothing was compared"
    wrong = {name: error for name, error in errors.items() if not error <= bounds[name]}
    if wrong:
        raise WrongError(
            ", ".join(f"{name} off by {error:.1e} (bound {bounds[name]:.0e})" for name, error in wrong.items())
        )
    worst = max(errors, key=lambda name: errors[name] / bounds[name])
    text = f"off by at most {errors[worst]:.1e} ({worst}; bound {bounds[worst]:.0e})"
    return Found(text, {f"error of {name}": error for name, error in errors.items()})


COLUMNS = ("tokens/s", "TFLOP/s", "MFU", "GiB", "compile s", "forward ms", "backward ms", "update ms")
"""The numbers of a step in the benchmark, in the order of its table."""


STATUSES: tuple[Status, ...] = ("failed", "passed", "measured", "skipped")


def page(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    """The report on one page: each promise with the number of its rows by result, and the failed rows. rows: in order
    of their checks."""
    lines = ["# GPU check", "", f"{', '.join(f'{key} {value}' for key, value in about.items())}", ""]
    lines += [f"{_counts(rows)}.", "", "| promise | rows | if it fails, look at |", "|---|---|---|"]
    of_promise: dict[str, list[Row]] = {}
    files: dict[str, set[str]] = {}
    for row in rows:
        promise = promise_of(row.check, row.name)
        of_promise.setdefault(promise.text, []).append(row)
        files.setdefault(promise.text, set()).add(promise.file)
    for text, group in of_promise.items():
        place = commonpath([*files[text]])  # the folder, if each row has a file of its own: failed rows name theirs
        lines.append(f"| {text} | {_counts(group)} | `{place}` |")
    for row in rows:
        if row.status == "failed":
            file = promise_of(row.check, row.name).file
            lines += ["", f"**failed: {row.check}: {row.name}**: {row.text}. Look at `{file}`."]
    return "\n".join(lines) + "\n"


def _counts(rows: Sequence[Row]) -> str:
    counts = Counter(row.status for row in rows)
    return ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status]) or "no rows"


def markdown(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    """The page, and a table of all rows per check. rows: in order of their checks."""
    lines = [page(rows, about).rstrip()]
    for check, grouped in groupby(rows, key=lambda row: row.check):
        group = list(grouped)
        plain = [row for row in group if COLUMNS[0] not in row.values]
        lines += ["", f"## {check}", "", "| case | result | s | |", "|---|---|---|---|"]
        lines += [f"| {cell(row.name)} | {row.status} | {_number(row.seconds)} | {cell(row.text)} |" for row in plain]
        steps = [row for row in group if COLUMNS[0] in row.values]
        if steps:
            lines += ["", f"| step | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
        for row in steps:
            numbers = [_number(row.values.get(column)) for column in COLUMNS]
            lines.append(f"| {cell(row.name)} | {' | '.join(numbers)} |")
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """The text for a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def _number(value: Value) -> str:
    """ "-" if unknown."""
    return "-" if value is None else value if isinstance(value, str) else number(value)
