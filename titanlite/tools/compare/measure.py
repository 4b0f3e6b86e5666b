"""Measure the relative differences of all pairs of runs: logged numbers, and weights at common checkpoints."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from titanlite.checkpoint.folder import published_steps, step_folder
from titanlite.checkpoint.state import MODEL
from titanlite.metrics.config import METRICS_FILE
from titanlite.metrics.jsonl import read_series
from titanlite.storage.address import Place
from titanlite.tools.compare.envelope import relative
from titanlite.tools.saved_run import open_run, stored_shapes, stored_tensors

NUMBERS = ("loss", "grad_norm", "validation/loss")
Pairs = Mapping[tuple[int, int], dict[str, dict[int, float]]]
"""Positions of two runs -> number or parameter -> step -> relative difference."""


@dataclass(frozen=True)
class Trained:
    """What a run has written. folder: its dump folder. checkpoints: the folder of its checkpoints."""

    folder: Path
    checkpoints: Place

    def rows(self) -> dict[str, dict[int, float]]:
        """The logged numbers: name -> step -> value."""
        series = read_series(self.folder / METRICS_FILE, NUMBERS)
        return {name: dict(zip(each.steps.tolist(), each.values.tolist(), strict=True))
                for name, each in series.items()}  # fmt: skip


def differences(runs: Sequence[Trained], last: int, parts: Sequence[str] = (MODEL,), *, allow_import: bool) -> Pairs:
    """The differences of all pairs, at each step up to `last` that all runs have. parts: prefixes of the tensors of
    checkpoints that are compared. allow_import: see open_run."""
    pairs: Pairs = {pair: {} for pair in combinations(range(len(runs)), 2)}
    rows = [run.rows() for run in runs]
    for name in NUMBERS:
        for step in _common([{*each.get(name, {})} for each in rows], last):
            for (first, second), found in pairs.items():
                found.setdefault(name, {})[step] = relative(rows[first][name][step], rows[second][name][step])
    for step in _common([{*published_steps(run.checkpoints)} for run in runs], last):
        saved = [open_run(step_folder(run.checkpoints, step), allow_import=allow_import) for run in runs]
        names = [name for name in stored_shapes(saved[0].path) if name.startswith((*parts,))]
        for of_runs in zip(*(stored_tensors(run.path, names) for run in saved), strict=True):
            name, tensors = of_runs[0][0].removeprefix(MODEL), [tensor.double() for _, tensor in of_runs]
            for (first, second), found in pairs.items():
                found.setdefault(name, {})[step] = relative_norm(tensors[first], tensors[second])
    return pairs


def common_steps(a: Trained, b: Trained) -> list[int]:
    """The steps whose loss both runs have logged, in ascending order."""
    return _common([{*run.rows().get("loss", {})} for run in (a, b)])


def _common(steps: Sequence[set[int]], last: float = math.inf) -> list[int]:
    return sorted(step for step in reduce(set.intersection, steps) if step <= last)


def relative_norm(one: Tensor, other: Tensor) -> float:
    """The norm of the difference, relative to the larger norm. Infinite if a value is not finite."""
    if torch.equal(one, other):
        return 0.0
    found = ((one - other).norm() / torch.maximum(one.norm(), other.norm())).item()
    return found if math.isfinite(found) else math.inf
