"""Optimizers on the quick start: loss at equal tokens, and at equal CPU seconds.

Each optimizer trains the quick start in a process of its own with one thread, one after the other, with the same seed.
"CPU" is of a step, with its share of the validations, from the process' seconds beyond those of a run of one step. "At
equal seconds" is the validation loss, interpolated between validations, at the step that a run has reached when AdamW's
would be done; the learning rate is then not at its end, so it is an upper bound for a run that is planned that long.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from benchmarks.measuring import Row, report

MUON = ("--optimizer.name", "Muon", "--optimizer.lr", "3e-3")
POLAR = (*MUON, "--optimizer.orthogonalization", "polar_express")
NORMUON = (*POLAR, "--optimizer.normuon_beta2", "0.95")
RECIPES: dict[str, tuple[str, ...]] = {
    "AdamW, lr 1.5e-3": (),
    "AdamW, cautious": ("--optimizer.cautious_weight_decay", "true"),
    "Muon, lr 3e-3": MUON,
    "Muon, Polar Express": POLAR,
    "and NorMuon": NORMUON,
    "and cautious": (*NORMUON, "--optimizer.cautious_weight_decay", "true"),
}


def trained(folder: Path, steps: int, interval: int, options: Sequence[str]) -> tuple[float, list[dict[str, float]]]:
    """(CPU seconds, rows of metrics.jsonl) of a run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = (
        *(sys.executable, "-m", "titanlite", "train", "quickstart", "--job.dump_folder", str(folder)),
        *("--training.steps", str(steps), "--validation.interval", str(interval), "--checkpoint.enable", "false"),
        *("--metrics.log_freq", "1", *options),
    )
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


class Trained(NamedTuple):
    """A run. step_s: CPU seconds of a step. validation: (step, loss). training: mean loss of the last 10 steps."""

    name: str
    step_s: float
    validation: list[tuple[int, float]]
    training: float


def quick_starts(cases: Mapping[str, Sequence[str]], steps: int, interval: int) -> Iterator[Trained]:
    """Train the quick start with the options of each case."""
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, options) in enumerate(cases.items()):
            place = Path(folder, str(number))
            started, _ = trained(place / "one", 1, interval, options)
            seconds, found = trained(place / "all", steps, interval, options)
            losses = [(int(row["step"]), row["validation/loss"]) for row in found if "validation/loss" in row]
            training = [row["loss"] for row in found if "loss" in row][-10:]
            yield Trained(name, (seconds - started) / (steps - 1), losses, sum(training) / len(training))


def at(losses: Sequence[tuple[int, float]], step: float) -> float:
    """The validation loss at a step, linear between two validations, and at most that of the last one."""
    for (before, loss), (after, other) in pairwise(losses):
        if before <= step <= after:
            return loss + (other - loss) * (step - before) / (after - before)
    return losses[-1][1]


def main(steps: int = 120, interval: int = 20, json: Path | None = None) -> None:
    """json: folder of recipes.json."""
    rows: list[Row] = []
    budget = 0.0
    for run in quick_starts(RECIPES, steps, interval):
        budget = budget or run.step_s
        rows.append(
            {
                "optimizer": run.name,
                "training loss, last 10 steps": run.training,
                "validation loss": run.validation[-1][1],
                "CPU (s)": run.step_s,
                "at equal seconds": at(run.validation, steps * budget / run.step_s),
            }
        )
        print(rows[-1], run.validation, file=sys.stderr, flush=True)
    report("recipes", {f"The quick start, {steps} steps": rows}, json)
