"""Set the differences of an interval against those that rounding causes: repeats of it, each with another rounding."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from titanlite.checkpoint.state import AVERAGE, MODEL, OPTIMIZER
from titanlite.config.schema import JobConfig
from titanlite.precision import DTYPES
from titanlite.runtime.errors import UserError
from titanlite.tools.audit.intervals import config_file
from titanlite.tools.audit.result import Verdict
from titanlite.tools.compare.envelope import compare, first_outside
from titanlite.tools.compare.measure import Trained, differences
from titanlite.tools.compare.repeats import repeats_of, train
from titanlite.tools.saved_run import saved_config
from titanlite.tools.sweep.combinations import Run
from titanlite.tools.sweep.command import RunsOptions
from titanlite.tools.sweep.training import Process

RUN, RECOMPUTED, REPEATS = 0, 1, 2
"""Positions in the compared runs; the repeats are the last ones."""


def within_rounding(
    sides: Sequence[Trained],
    steps: range,
    out: Path,
    count: int,
    options: RunsOptions,
    start: Callable[[Run, int], Process],
    *,
    allow_import: bool,
) -> tuple[Verdict, str]:
    """Train `count` repeats of an interval; compare the difference of the run and its recomputation with theirs.

    sides: the run, its recomputation. Repeats that are trained already are not trained again. allow_import: see
    open_run. Raises UserError.
    """
    file = config_file(out, steps)
    folder, last = out / f"{file.stem}-repeats", steps[-1]
    folder.mkdir(exist_ok=True)
    config = _accepting(saved_config(file, (), sides[RUN].folder, allow_import=allow_import))
    runs = repeats_of(config, folder, count, last, options.processes, options.device_type)
    train(runs, last, lambda run: start(run, options.processes))
    repeats = [Trained(run.folder, run.folder / run.config.checkpoint.folder) for run in runs]
    parts = (MODEL, AVERAGE, OPTIMIZER)
    pairs = differences([*sides, *repeats], last, parts, allow_import=allow_import)
    among = [found for (first, _), found in pairs.items() if first >= REPEATS]
    if not any(difference for found in among for by_step in found.values() for difference in by_step.values()):
        raise UserError("all repeats are equal bit for bit, so rounding was not measured: write another --nproc")
    compared = compare(pairs[RUN, RECOMPUTED], among, torch.finfo(DTYPES[config.training.dtype]).eps)
    first = first_outside(compared)
    found = first or max(compared, key=lambda each: each.difference / each.allowed)
    line = f"{found.name} differs by {found.difference:.1e}, rounding explains {found.allowed:.1e} ({count} repeats)"
    return ("differs", f"step {found.step}: {line}") if first else ("within", f"at most, in step {found.step}, {line}")


def _accepting(config: JobConfig) -> JobConfig:
    """The configuration, with which repeats resume without training.bit_equal from a checkpoint of a run with it."""
    section = config.checkpoint
    if not config.training.bit_equal or not section.initial_load_path:
        return config
    return replace(config, checkpoint=replace(section, accept_changes=(*section.accept_changes, "bit_equal")))
