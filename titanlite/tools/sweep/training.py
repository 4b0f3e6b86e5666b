"""Train the runs of a sweep one after the other."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from titanlite.assembly.summary import titanlite
from titanlite.checkpoint.folder import latest_manifest
from titanlite.metrics.config import METRICS_FILE
from titanlite.metrics.jsonl import Series, has_validation, last_row, read_series, value_at_end
from titanlite.runtime.environment import safe_imports
from titanlite.runtime.errors import UserError
from titanlite.runtime.text import aligned, visible
from titanlite.storage.address import place
from titanlite.tools.command import print_lines
from titanlite.tools.sweep.combinations import Run, short_names

State = Literal["new", "interrupted", "finished"]
LOSS = "validation/loss"
KILL_S = 5.0
"""How long a run may take to end after the second Ctrl-C."""


class Process(Protocol):
    """The part of subprocess.Popen that is needed."""

    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


def start_run(run: Run, processes: int, error_file: Path | None = None) -> Process:
    """Start the training in a session of its own: Ctrl-C reaches it through this process only. error_file: for the
    message of a failure, which error_in reads."""
    environment = {**os.environ, **safe_imports(), "NGPU": str(processes)}
    if error_file is not None:
        error_file.unlink(missing_ok=True)
        environment["TORCHELASTIC_ERROR_FILE"] = str(error_file)
    command = [sys.executable, "-P", "-m", "titanlite.torchrun.launcher", "--", *run.arguments]
    return subprocess.Popen(command, env=environment, start_new_session=True)


def error_in(file: Path) -> str:
    """The message of a failed run in its error file; "" if there is none."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return ""
    return str(content["message"]["message"]).removeprefix("titanlite: ")


def state_of(run: Run) -> State:
    """Whether the run has reached its last step, with its validation, and with checkpoints saved it."""
    section, steps = run.config.checkpoint, run.config.training.steps
    manifest = latest_manifest(place(section.folder, run.folder)) if section.enable else None
    metrics = run.folder / METRICS_FILE
    logged = last_row(metrics).get("step", 0)
    reached = logged if not section.enable else manifest.step if manifest is not None else 0
    if reached >= steps and (not run.config.validation.enable or has_validation(metrics, steps)):
        return "finished"
    return "interrupted" if logged else "new"


def final_loss(run: Run) -> float | None:
    """The validation loss after the last step of a run; None before. Raises UserError if it is not finite."""
    loss = value_at_end(run.folder / METRICS_FILE, LOSS, run.config.training.steps)
    if loss is None or state_of(run) != "finished":
        return None
    if not 0 < loss < math.inf:
        remedy = "lower its learning rate and remove its folder, or leave the run out"
        raise UserError(f"{run.folder}: the validation loss after the last step is {loss}: {remedy}")
    return loss


def train_all(runs: Sequence[Run], start: Callable[[Run], Process]) -> dict[str, int]:
    """Train the runs that are not finished. Returns the exit code of each started run, by name.

    A run that fails does not stop the others. On Ctrl-C or a signal, the current run is stopped first.
    """
    codes: dict[str, int] = {}
    for number, run in enumerate(runs, start=1):
        label = f"Run {number} of {len(runs)}, {describe(run)}"
        state = state_of(run)
        if state == "finished":
            print_lines(f"{label}: finished before, skipped")
            continue
        resumes = "resumes, " if state == "interrupted" and run.config.checkpoint.enable else ""
        print_lines(f"{label}: {resumes}in {run.folder}")
        codes[run.name] = wait_for(start(run))
        if code := codes[run.name]:
            print(f"titanlite: run {number} of {len(runs)}, {visible(describe(run))}, failed ({code})", file=sys.stderr)
    return codes


def describe(run: Run) -> str:
    """The values of the run."""
    return ", ".join(f"{key} = {value}" for key, value in run.values.items())


def wait_for(process: Process) -> int:
    """The exit code of the process. If this process is interrupted or terminated, stops the other one first."""
    try:
        return process.wait()
    except (KeyboardInterrupt, SystemExit) as end:
        stop(process, signal.SIGINT if isinstance(end, KeyboardInterrupt) else signal.SIGTERM)
        raise


def stop(process: Process, number: int) -> None:
    """Stop a run, which saves first if it has checkpoints. Another signal meanwhile stops it at once."""
    with suppress(ProcessLookupError):
        process.send_signal(number)
    try:
        print("titanlite: stopping the run; once more: without a save", file=sys.stderr, flush=True)
        process.wait()
    except (KeyboardInterrupt, SystemExit):
        with suppress(ProcessLookupError):
            process.send_signal(number)
        try:
            process.wait(KILL_S)
        except (subprocess.TimeoutExpired, TimeoutError, KeyboardInterrupt, SystemExit):
            process.kill()


def folders(runs: Sequence[Run]) -> list[Path]:
    """The folders of the runs that have logged a step."""
    return [run.folder for run in runs if (run.folder / METRICS_FILE).is_file()]


REPORT = "report.html"
SHOWN: Mapping[State, str] = {"new": "not started", "interrupted": "not finished", "finished": "finished"}


def results(runs: Sequence[Run], codes: Mapping[str, int]) -> list[str]:
    """The lines of the table, and the command of the report. codes: exit codes, by name."""
    found = folders(runs)
    report = ["", report_line(*found, folder=runs[0].folder.parent)] if found else []
    return [*table(runs, codes), *report]


def table(runs: Sequence[Run], codes: Mapping[str, int]) -> list[str]:
    """The lines of the table; codes: as of results."""
    head = [*short_names(list(runs[0].values)).values(), "step", "loss", "validation loss", "tokens/s", "state"]
    return aligned([head, *(_row(run, codes.get(run.name, 0)) for run in runs)])


def report_line(*reported: Path, folder: Path) -> str:
    """The command that writes a report of these folders into `folder`."""
    return f"Report: {titanlite()} report {shlex.join(map(str, [*reported, '--out', folder / REPORT]))}"


def _row(run: Run, code: int) -> list[str]:
    series = read_series(run.folder / METRICS_FILE, ("loss", "tokens_per_second", LOSS))
    step = max((int(each.steps[-1]) for each in series.values()), default=0)
    speed = series.get("tokens_per_second")
    # without the first row, whose steps compile and warm up
    rate = float(np.median(speed.values[1:] if len(speed.values) > 1 else speed.values)) if speed else None
    return [
        *run.values.values(),
        f"{step:,}",
        _last(series.get("loss")),
        _last(series.get(LOSS)),
        "-" if rate is None else f"{rate:,.0f}",
        f"failed ({code})" if code else SHOWN[state_of(run)],
    ]


def _last(series: Series | None) -> str:
    return "-" if series is None else f"{series.values[-1]:.4f}"
