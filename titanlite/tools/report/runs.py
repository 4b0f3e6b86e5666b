"""The files of a run that a report shows, also of a run in progress."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tomli

from titanlite.config.load import CONFIG_COPY
from titanlite.metrics.about import Started, mesh_text, read_starts
from titanlite.metrics.config import EXPERTS_FILE, METRICS_FILE, SAMPLES_FILE
from titanlite.metrics.jsonl import Series, last_line, read_history, read_lines
from titanlite.metrics.records import ExpertsRow, SampleRow
from titanlite.ranks.positions import FAULTS_FOLDER
from titanlite.runtime.errors import UsageError, UserError
from titanlite.runtime.files import open_regular
from titanlite.runtime.logging import log
from titanlite.storage.address import Place
from titanlite.tools.audit.result import AUDIT_FOLDER, Result, read_results
from titanlite.tools.dump_folder import local_dump_folder

DATA_WAIT = "data_wait"
"""Percent of the step time."""
MAX_LOAD, MIN_LOAD = "max_load", "min_load"
"""Extremes over the blocks."""

Kind = Literal["restart", "mesh change", "skipped steps", "fault"]


@dataclass(frozen=True)
class Event:
    """Something that happened at a step. text: what, in one line."""

    kind: Kind
    step: int
    text: str


@dataclass(frozen=True)
class Goodput:
    """Seconds from the first start to the last row of metrics.jsonl, by use.

    steps: of the steps that the run kept. other: start-up, saves between log lines, steps that were lost, time between
    starts.
    """

    steps: float
    validation: float
    other: float

    @property
    def total(self) -> float:
        return max(self.steps + self.validation + self.other, 1e-9)

    @property
    def percent(self) -> dict[str, float]:
        """Of the total, by the classes of the page's bars."""
        parts = {"good": self.steps, "check": self.validation, "other": self.other}
        return {name: 100 * part / self.total for name, part in parts.items()}


@dataclass(frozen=True)
class RunFiles:
    """A run. name: distinguishes it from the other runs of the report. folder: its path or address. loads: the last
    ones, if the model has experts. config: by full key; {} if unknown. audits: of its intervals, by `titanlite audit`.
    note: see History.
    """

    name: str
    folder: str
    series: Mapping[str, Series]
    starts: Sequence[Started]
    events: Sequence[Event]
    goodput: Goodput | None
    samples: Sequence[SampleRow]
    loads: ExpertsRow | None
    config_text: str
    config: Mapping[str, Any]
    audits: Sequence[Result] = ()
    note: str = ""

    @property
    def last_step(self) -> int:
        """The last logged step; 0 before the first one."""
        return max((int(series.steps[-1]) for series in self.series.values()), default=0)


def read_runs(folders: Sequence[Place]) -> list[RunFiles]:
    """Read the runs. Raises UserError."""
    runs = []
    for name, place in zip(distinct_names(folders), folders, strict=True):
        with local_dump_folder(place, FAULTS_FOLDER) as folder:
            runs.append(_read_run(name, folder, _absolute(place)))
    return runs


def over_tokens(run: RunFiles) -> RunFiles:
    """The run with tokens in place of steps, in its series and events. Steps without a row are interpolated. Raises
    UserError."""
    tokens = run.series.get("tokens_seen")
    if tokens is None:
        return run

    if not np.all((np.diff(tokens.values, prepend=0.0) >= 0) & (tokens.values < 2**63)):
        raise UserError(f"tokens_seen in {run.folder} does not grow from row to row: leave out --over tokens")

    def at(steps: Any) -> Any:
        known, values = np.concatenate([[0], tokens.steps]), np.concatenate([[0.0], tokens.values])
        return np.interp(steps, known, values).astype(np.int64)

    series = {key: Series(at(each.steps), each.values) for key, each in run.series.items()}
    return replace(run, series=series, events=[replace(event, step=int(at(event.step))) for event in run.events])


def distinct_names(folders: Sequence[Place]) -> list[str]:
    """The last parts of each path, as many as distinguish it from the others. Raises UsageError for equal folders."""
    paths = [Path(_absolute(folder)) for folder in folders]
    if twice := next((folder for folder, path in zip(folders, paths, strict=True) if paths.count(path) > 1), None):
        raise UsageError(f"{twice} is given twice: pass each run once")
    counts = [1] * len(paths)
    while True:
        names = ["/".join(path.parts[-count:]) for path, count in zip(paths, counts, strict=True)]
        if len(set(names)) == len(names):
            return ["".join(char if char.isprintable() else "\ufffd" for char in name) for name in names]
        counts = [count + (names.count(name) > 1) for name, count in zip(names, counts, strict=True)]


def _absolute(place: Place) -> str:
    return os.path.realpath(place) if isinstance(place, Path) else str(place)


def _read_run(name: str, folder: Path, shown: str) -> RunFiles:
    history = read_history(folder / METRICS_FILE)
    series = _with_derived(history.series)
    try:
        starts = read_starts(folder)
        ended = (folder / METRICS_FILE).stat().st_mtime if series else 0.0
        faults = sorted(path.name for path in (folder / FAULTS_FOLDER).glob("*")) if starts else []
    except OSError as error:
        raise UserError(f"cannot read {error.filename or folder}: {error.strerror or error}") from None
    config_text, config = _read_config(folder / CONFIG_COPY)
    last_step = max((int(each.steps[-1]) for each in series.values()), default=0)
    events = [*_events_of_starts(starts), *_skipped(series), *_faults(faults, starts, last_step)]
    return RunFiles(
        name,
        shown,
        series,
        starts,
        sorted(events, key=lambda event: event.step),
        _goodput(series, starts, ended),
        _read_samples(folder / SAMPLES_FILE),
        last_line(folder / EXPERTS_FILE, ExpertsRow),
        config_text,
        config,
        read_results(folder / AUDIT_FOLDER),
        history.note,
    )


def _with_derived(series: Mapping[str, Series]) -> dict[str, Series]:
    """The series and those that rows do not have: DATA_WAIT, MAX_LOAD, MIN_LOAD."""
    found = dict(series)
    waits, times = series.get("data_time_s"), series.get("step_time_s")
    if waits and times and len(waits.steps) == len(times.steps):
        with np.errstate(all="ignore"):
            found[DATA_WAIT] = Series(waits.steps, 100 * waits.values / times.values)
    for name, extreme in ((MAX_LOAD, np.maximum), (MIN_LOAD, np.minimum)):
        of_blocks = [each for key, each in series.items() if key.startswith(f"{name}/")]
        if of_blocks and len({len(each.steps) for each in of_blocks}) == 1:
            found[name] = Series(of_blocks[0].steps, extreme.reduce([each.values for each in of_blocks]))
    return found


def _read_config(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of config.toml, and its values by full key. Of any version, so it is not parsed as a configuration."""
    try:
        with open_regular(path) as file:
            text = file.read().decode()
        return text, dict(_flat(tomli.loads(text)))
    except FileNotFoundError:
        return "", {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s cannot be read: %s; the report has no configuration of this run", path, error)
        return "", {}


def _flat(value: Any, key: str = "") -> list[tuple[str, Any]]:
    """(full key, value) of all keys, as on the command line."""
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        value = {str(index): row for index, row in enumerate(value)}
    if not isinstance(value, dict):
        return [(key, value)]
    return [pair for name, inner in value.items() for pair in _flat(inner, f"{key}.{name}" if key else name)]


def _read_samples(path: Path) -> list[SampleRow]:
    """The samples by step. A later sample of the same step and prompt replaces an earlier one."""
    found = {(sample["prompt"], sample["step"]): sample for sample in read_lines(path, SampleRow)}
    return sorted(found.values(), key=lambda sample: sample["step"])


def _events_of_starts(starts: Sequence[Started]) -> list[Event]:
    events = []
    for before, start in pairwise(starts):
        text = f"resumed from step {start.step:,}, {start.moment:%Y-%m-%d %H:%M:%S}"
        if start.mesh == before.mesh:
            events.append(Event("restart", start.step, text))
        else:
            text = f"{text}; {mesh_text(before.mesh)} → {mesh_text(start.mesh)}"
            events.append(Event("mesh change", start.step, text))
    return events


def _skipped(series: Mapping[str, Series]) -> list[Event]:
    """An event per row at which the count of skipped steps has grown."""
    if "skipped_steps" not in series:
        return []
    counts = series["skipped_steps"]
    before = np.concatenate([[0], counts.values[:-1]])
    events = []
    for row in np.flatnonzero((counts.values > before) & np.isfinite(counts.values - before)):
        count, step = int(counts.values[row] - before[row]), int(counts.steps[row])
        since = int(counts.steps[row - 1]) + 1 if row else 1
        text = f"step {step:,}" if since == step else f"{count:,} of the steps {since:,} to {step:,}"
        events.append(Event("skipped steps", step, f"{text} skipped"))
    return events


def _faults(names: Sequence[str], starts: Sequence[Started], last_step: int) -> list[Event]:
    """Folders of stacks, at the step from which the run resumed afterwards; without a later start, at the last row."""
    events = []
    for name in names:
        try:
            moment = datetime.strptime(name, "%Y%m%d-%H%M%S").astimezone()  # the folder's name is in local time
        except (ValueError, OverflowError):
            continue  # a snapshot of the allocator, or a year that no clock has
        step = next((start.step for start in starts if start.moment > moment), last_step)
        events.append(Event("fault", step, f"a rank ended or hung, {moment:%Y-%m-%d %H:%M:%S}: {FAULTS_FOLDER}/{name}"))
    return events


def _goodput(series: Mapping[str, Series], starts: Sequence[Started], ended: float) -> Goodput | None:
    """ended: when the last row was written, in Unix seconds. None if unknown."""
    if not starts or "step_time_s" not in series:
        return None
    first = starts[0]
    times = series["step_time_s"]
    steps = np.diff(np.maximum(times.steps, first.step), prepend=first.step)
    in_steps = float(np.dot(steps, np.nan_to_num(times.values)))
    validations = series.get("validation/time_s")
    validation = float(validations.values[validations.steps > first.step].sum()) if validations else 0.0
    total = ended - first.moment.timestamp()
    other = total - in_steps - validation
    # run.json has full seconds. A copy of metrics.jsonl may have the time of the copying.
    is_known = min(in_steps, validation) >= 0 and other > -1 - 0.01 * total
    return Goodput(in_steps, validation, max(other, 0.0)) if is_known else None


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose values differ, or that some configurations lack, except job.dump_folder."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [
        key
        for key in keys
        if key != "job.dump_folder" and len({json.dumps(config.get(key), default=str) for config in configs}) > 1
    ]
