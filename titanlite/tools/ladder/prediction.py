"""The prediction of a ladder: the law, its interval, and the file that the report reads."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from titanlite.runtime.errors import ConfigError, Problem
from titanlite.runtime.text import counted
from titanlite.tools.ladder.fit import (
    MAX_EXPONENT,
    MIN_SIZES,
    NUM_CONSTANTS,
    Law,
    Point,
    bootstrap,
    determines_law,
    fit,
)
from titanlite.tools.ladder.rungs import Ladder, Rung
from titanlite.tools.sweep.training import final_loss

LADDER_FILE = "ladder.json"
"""The prediction, in the dump folder of the ladder."""
INTERVAL = (5, 95)
"""Percentiles of the bootstrap."""


Count = Annotated[int, Field(ge=1, lt=2**63)]
Number = Annotated[float, Field(ge=0, lt=1e100)]
"""Of a law or a loss."""


class PointRow(TypedDict):
    """A run. folder: below that of the ladder. loss: measured. fitted: by the law."""

    rung: str
    folder: str
    parameters: Count
    tokens: Count
    loss: Number
    fitted: Number


class TargetRow(TypedDict):
    """The run to predict. fitted: its loss by the law; interval: of this loss."""

    parameters: Count
    tokens: Count
    fitted: Number
    interval: Annotated[list[Number], Field(min_length=2, max_length=2)]


class Prediction(TypedDict):
    """The content of LADDER_FILE. law: its constants. intervals: of each constant. runs: those that were fitted."""

    law: dict[str, Number]
    intervals: dict[str, list[float]]
    runs: list[PointRow]
    target: TargetRow


def require_enough(rungs: Sequence[Rung]) -> None:
    """Raise ConfigError unless the runs can determine a law, with a run more than it has constants."""
    points = [Point(rung.parameters, rung.tokens, 1.0) for rung in rungs]
    sizes = (len({point.parameters for point in points}), len({point.tokens for point in points}))
    if determines_law(points) and len(rungs) > NUM_CONSTANTS:
        return
    count = f"{counted(len(rungs), 'run')} of {sizes[0]} sizes and {sizes[1]} numbers of tokens"
    rule = (
        f"more runs than the {NUM_CONSTANTS} constants of the law, of at least {MIN_SIZES} sizes and numbers of tokens"
    )
    remedy = "add rungs, or values of tokens_per_parameter"
    raise ConfigError([Problem("rungs", count, rule, remedy)])


def predict(ladder: Ladder, losses: Sequence[float]) -> Prediction:
    """The prediction from the losses of all rungs."""
    points = [Point(rung.parameters, rung.tokens, loss) for rung, loss in zip(ladder.rungs, losses, strict=True)]
    law = fit(points)
    laws = bootstrap(points, law)
    target = ladder.target
    constants = {name: [asdict(each)[name] for each in laws] for name in asdict(law)}
    runs = zip(ladder.rungs, points, strict=True)
    return {
        "law": asdict(law),
        "intervals": {name: interval_of(values) for name, values in constants.items()},
        "runs": [
            {
                "rung": rung.name,
                "folder": rung.run.name,
                "parameters": rung.parameters,
                "tokens": rung.tokens,
                "loss": point.loss,
                "fitted": _loss(law, rung),
            }
            for rung, point in runs
        ],
        "target": {
            "parameters": target.parameters,
            "tokens": target.tokens,
            "fitted": _loss(law, target),
            "interval": interval_of([_loss(each, target) for each in laws]),
        },
    }


def _loss(law: Law, rung: Rung) -> float:
    return law.loss(rung.parameters, rung.tokens)


def interval_of(values: Sequence[float]) -> list[float]:
    """The lower and the upper end of the interval."""
    return [float(end) for end in np.percentile(values, INTERVAL)]


def lines_of(ladder: Ladder, found: Prediction) -> list[str]:
    """What the command prints of a prediction, and of the target's loss if it was trained."""
    law, target = found["law"], found["target"]
    ends = {name: "{:.4g} to {:.4g}".format(*interval) for name, interval in found["intervals"].items()}
    constants = ", ".join(f"{name} = {law[name]:.4g} ({ends[name]})" for name in law)
    worst = max(found["runs"], key=lambda row: abs(row["fitted"] / row["loss"] - 1))
    low, high = target["interval"]
    used, needed = sum(rung.flops for rung in ladder.rungs), ladder.target.flops
    size, tokens = (max(getattr(rung, key) for rung in ladder.rungs) for key in ("parameters", "tokens"))
    lines = [
        f"Law: L = E + A / N^alpha + B / D^beta, fitted to {counted(len(ladder.rungs), 'run')}; intervals of 90 %",
        f"  {constants}",
        f"  largest difference to a run: {worst['fitted'] / worst['loss'] - 1:+.2%}, {worst['folder']}",
        f"Target: N = {target['parameters']:,} ({target['parameters'] / size:.2g} x the largest rung), "
        f"D = {target['tokens']:,} ({target['tokens'] / tokens:.2g} x)",
        f"  predicted loss {target['fitted']:.4f}, interval {low:.4f} to {high:.4f}",
        f"  FLOPs: {needed:.3g}; of the ladder {used:.3g}, {used / needed:.1%} of them",
    ]
    for name, what in (("alpha", "N"), ("beta", "D")):
        if not 0.01 * MAX_EXPONENT < law[name] < 0.99 * MAX_EXPONENT:
            why = f"the losses show no power law in {what}"
            lines.append(f"  Warning: {name} is at the end of its range, 0 to {MAX_EXPONENT:g}: {why}: add rungs")
    if law["E"] < 0.01 * min(row["loss"] for row in found["runs"]):
        why = "the losses do not level off, and the prediction is probably too low"
        lines.append(f"  Warning: E is near 0: {why}: add larger and longer rungs")
    if measured := final_loss(ladder.target.run):
        where = "inside" if low <= measured <= high else "outside"
        difference = target["fitted"] / measured - 1
        lines.append(
            f"  measured loss {measured:.4f}: {where} the interval, the prediction differs by {difference:+.2%}"
        )
    return lines
