"""The table that compares the runs of a sweep."""

import shlex
from collections.abc import Mapping, Sequence

import numpy as np

from titanlite.assembly.summary import titanlite
from titanlite.metrics.config import METRICS_FILE
from titanlite.metrics.jsonl import Series, read_series
from titanlite.runtime.text import aligned
from titanlite.tools.sweep.combinations import Run, short_names
from titanlite.tools.sweep.training import State, folders, state_of

REPORT = "report.html"
SHOWN: Mapping[State, str] = {"new": "not started", "interrupted": "not finished", "finished": "finished"}


def results(runs: Sequence[Run], codes: Mapping[str, int]) -> list[str]:
    """The lines of the table, and the command of the report. codes: exit codes, by name."""
    names = list(short_names(list(runs[0].values)).values())
    head = [*names, "step", "loss", "validation loss", "tokens/s", "state"]
    lines = aligned([head, *(_row(run, codes.get(run.name, 0)) for run in runs)])
    if found := folders(runs):
        paths = [*found, "--out", runs[0].folder.parent / REPORT]
        lines += ["", f"Report: {titanlite()} report {shlex.join(map(str, paths))}"]
    return lines


def _row(run: Run, code: int) -> list[str]:
    series = read_series(run.folder / METRICS_FILE)
    step = max((int(each.steps[-1]) for each in series.values()), default=0)
    speed = series.get("tokens_per_second")
    # without the first row, whose steps compile and warm up
    rate = float(np.median(speed.values[1:] if len(speed.values) > 1 else speed.values)) if speed else None
    return [
        *run.values.values(),
        f"{step:,}",
        _last(series.get("loss")),
        _last(series.get("validation/loss")),
        "-" if rate is None else f"{rate:,.0f}",
        f"failed ({code})" if code else SHOWN[state_of(run)],
    ]


def _last(series: Series | None) -> str:
    return "-" if series is None else f"{series.values[-1]:.4f}"
