"""Compare an interval of a run with its recomputation: logged rows, recorded steps, the ledger, the last checkpoint."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from titanlite.checkpoint.compatibility import differences as facts_differences
from titanlite.checkpoint.compatibility import with_missing
from titanlite.data.fingerprint import describe_difference
from titanlite.data.ledger import read_ledger
from titanlite.faults.record import RecordedStep, read_records
from titanlite.metrics.config import METRICS_FILE
from titanlite.metrics.jsonl import read_rows
from titanlite.metrics.records import is_validation
from titanlite.tools import digest
from titanlite.tools.replay.compare import differences as relative_differences
from titanlite.tools.saved_run import SavedRun

MEASURED = ("time", "unix_time", "step_time_s", "data_time_s", "tokens_per_second", "memory_gib", "mfu", "slowest")
"""Beginnings of the columns, behind "validation/", that are no computed numbers."""
OTHERS = ("goodput", "computed_by", "interval_loss", "epoch/")
First = tuple[int, str]
"""The first step at which something differs, and what."""
ROUNDING = 1e-6
"""Relative, of a recorded gradient norm: its parts by rank are added up."""
EXACT = ("lr", "num_valid", "tokens_seen", "bad_rows", "too_long/", "share/")
"""Beginnings of the columns that rounding does not change."""


@dataclass(frozen=True)
class Side:
    """One computation of an interval. folder: its dump folder. end: the last step's checkpoint. allow_import: see
    open_run."""

    folder: Path
    end: SavedRun
    allow_import: bool

    @cached_property
    def sums(self) -> digest.Sums:
        return digest.sums_of(str(self.end.path), allow_import=self.allow_import)


def differences(run: Side, again: Side, steps: range, *, rounds: bool = False) -> Iterator[str]:
    """A line for each kind of record that differs, with the first step at which it does; nothing if all are equal.

    Records that only one of them has are not compared. rounds: True: leave out what rounding may explain.
    """
    earlier, later = (with_missing(each.end.manifest.facts) for each in (run, again))
    yield from (f"data: {line}" for line in describe_difference(earlier.pop("data", {}), later.pop("data", {})))
    for line in facts_differences(earlier, later, ""):
        yield line.removeprefix(".").replace("in the checkpoint", "in the run")
    folders = run.folder, again.folder
    found = [_of_ledgers(*folders, steps), _of_rows(*folders, steps, rounds), _of_steps(*folders, steps, rounds)]
    for step, line in sorted(filter(None, found), key=lambda each: each[0]):
        yield f"step {step}: {line}"
    yield from digest.missing(run.sums, again.sums)
    if not rounds:
        yield from digest.differences(run.sums, again.sums)


def _of_steps(run: Path, again: Path, steps: range, rounds: bool) -> First | None:
    """The first recorded step that differs, and the parameter whose gradient differs most. rounds: see differences."""
    before, after = _recorded(run), _recorded(again)
    for number in steps:
        if number not in before or number not in after:
            continue
        was, now = before[number], after[number]
        if was.num_valid != now.num_valid:
            return number, f"{was.num_valid} valid tokens, recomputed {now.num_valid}: other data"
        if rounds:
            continue
        rows = [
            row
            for row, pair in enumerate(zip(was.row_losses, now.row_losses, strict=True))
            if len({*map(repr, pair)}) > 1
        ]
        if rows:
            return number, (
                f"the loss of sequence {was.first_sequence + rows[0]} was {was.row_losses[rows[0]]!r}, "
                f"recomputed {now.row_losses[rows[0]]!r}; {len(rows)} of {len(was.row_losses)} sequences differ"
            )
        found = relative_differences(was, now)
        name = max(found, key=lambda each: found[each])
        if found[name] > ROUNDING:
            return number, f"the gradient of {name} differs most, by {found[name]:.1e}"
    return None


def _recorded(folder: Path) -> Mapping[int, RecordedStep]:
    return {step: found for record in reversed(read_records(folder)) for step, found in record.steps.items()}


def _of_rows(run: Path, again: Path, steps: range, rounds: bool) -> First | None:
    """The first logged row that differs, and its columns. rounds: see differences."""
    before, after = _logged(run, steps), _logged(again, steps)
    for step, is_of_validation in sorted(before.keys() & after.keys()):
        was, now = (rows[step, is_of_validation] for rows in (before, after))
        compared = [key for key in was if key in now and (key.startswith(EXACT) or not rounds)]
        keys = [key for key in compared if was[key] != now[key]]
        if keys:
            shown = ", ".join(f"{key} was {was[key]}, recomputed {now[key]}" for key in keys[:3])
            return step, shown + (f", and {len(keys) - 3} more columns" if len(keys) > 3 else "")
    return None


def unlogged(run: Side, again: Side, steps: range) -> Iterator[str]:
    """Name the logged rows that only the recomputation has."""
    rows = sorted(_logged(again.folder, steps).keys() - _logged(run.folder, steps).keys())
    if rows:
        shown = ", ".join(f"{step}{' (validation)' if is_of_validation else ''}" for step, is_of_validation in rows[:3])
        more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
        yield f"{METRICS_FILE} of the run has no row of step {shown}{more}: not compared"


def _logged(folder: Path, steps: range) -> dict[tuple[int, bool], dict[str, Any]]:
    """The computed numbers of each row in these steps."""
    return {
        (row["step"], is_validation(row)): {key: value for key, value in row.items() if _is_computed(key)}
        for row in read_rows(folder / METRICS_FILE, steps)
    }


def _is_computed(key: str) -> bool:
    return not key.removeprefix("validation/").startswith((*MEASURED, *OTHERS))


def _of_ledgers(run: Path, again: Path, steps: range) -> First | None:
    """The first step whose sequences came from other places."""
    before, after = ({step: rows for step, rows in read_ledger(folder) if step in steps} for folder in (run, again))
    for step in sorted(before.keys() & after.keys()):
        if before[step] != after[step]:
            row = next(was for was, now in zip(before[step], after[step], strict=False) if was != now)
            return step, f"sequence {row[0]} of the ledger was from source {row[1]}, piece {row[3]}: other data"
    return None
