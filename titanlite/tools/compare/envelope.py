"""How far rounding alone drives repeats of a run apart, and whether two runs differ by more."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

FACTOR = 4.0
"""How many times the largest difference between two repeats, up to the next step, two runs may differ at a step."""
FLOOR_EPS = 16
"""Rounding steps of the dtype by which numbers may always differ."""

Differences = Mapping[str, Mapping[int, float]]
"""Relative differences of two runs: number or parameter -> step -> difference."""


@dataclass(frozen=True)
class Compared:
    """One number or parameter at one step: the relative difference of the two runs, and the largest allowed one."""

    step: int
    name: str
    difference: float
    allowed: float

    @property
    def is_within(self) -> bool:
        return self.difference <= self.allowed


def compare(two: Differences, repeats: Sequence[Differences], eps: float) -> list[Compared]:
    """Compare each difference of the two runs with those of all pairs of repeats. Returns them in the order of steps.

    eps: of the dtype of the parameters. Differences grow with the steps, but not evenly: what rounding has reached
    once, it may reach again, and what it reaches one step later, as in the first steps of narrow dtypes, it could now.
    """
    found = []
    for name, by_step in two.items():
        reached = FLOOR_EPS * eps / FACTOR
        steps = sorted(by_step)
        for step, following in zip(steps, [*steps[1:], steps[-1]], strict=True):
            reached = max(reached, *(each[name][at] for each in repeats for at in (step, following)))
            found.append(Compared(step, name, by_step[step], FACTOR * reached))
    return sorted(found, key=lambda each: each.step)


def first_outside(compared: Iterable[Compared]) -> Compared | None:
    """The first one outside; of several at its step, the one that exceeds what is allowed by the largest factor."""
    outside = [each for each in compared if not each.is_within]
    return min(outside, key=lambda each: (each.step, -each.difference / each.allowed), default=None)


def relative(one: float, other: float) -> float:
    """The relative difference of two numbers. Infinite if only one of them is finite."""
    if one == other or not (math.isfinite(one) or math.isfinite(other)):
        return 0.0
    found = abs(one - other) / max(abs(one), abs(other))
    return found if math.isfinite(found) else math.inf
