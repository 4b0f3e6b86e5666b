"""Where the time of a run goes, by cause.

Goodput is the share of a run's wall time that was spent in steps. The time of rank 0 since the run's first start is
divided among causes without gaps, by the clock of the host, which waits for the device at log lines only. It continues
over restarts: the time from the last row up to the step from which a start resumes, to its own first step, is lost by
the restart, also what was computed in between and is computed again.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

STEPS, START, RESTART, DATA, SAVING, VALIDATION, OTHER = CAUSES = (
    *("steps", "start", "restart", "data", "saving", "validation", "other"),
)
PHASES = {
    "waiting for data": DATA,
    "forward, backward and update": STEPS,
    "logging": STEPS,  # the host waits for the steps here
    "saving": SAVING,
    "validating": VALIDATION,
}
"""Cause by phase of the training loop; all others are OTHER."""
GOODPUT, UNIX_TIME = "goodput", "unix_time"
COLUMNS = (GOODPUT, UNIX_TIME, *(f"time_s/{cause}" for cause in CAUSES))


class Goodput:
    """Wall time by cause. Before the first step, all of it belongs to the start, or to the restart."""

    def __init__(
        self,
        earlier: Mapping[str, Any],
        *,
        began: float,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """earlier: the last row of metrics.jsonl up to the step from which the run resumes; {} for a new run, and if
        there is no such row. began: the construction of the run, by `clock`."""
        self._clock, self._unix_clock = clock, unix_clock
        self._seconds = {cause: float(earlier.get(f"time_s/{cause}", 0.0)) for cause in CAUSES}
        self._cause, self._since = (RESTART if earlier else START), began
        if earlier:
            lost = unix_clock() - float(earlier.get(UNIX_TIME, unix_clock()))
            self._since = clock() - max(lost, clock() - began)  # a clock that was set back loses nothing
        self._has_trained = False

    def enter(self, phase: str) -> None:
        """Note that the training loop enters a phase."""
        cause = PHASES.get(phase, OTHER)
        self._has_trained = self._has_trained or cause == STEPS
        if self._has_trained:
            self._add()
            self._cause = cause

    def columns(self) -> dict[str, float]:
        """COLUMNS -> value, up to now."""
        self._add()
        of_causes = {f"time_s/{cause}": seconds for cause, seconds in self._seconds.items()}
        return {GOODPUT: self._seconds[STEPS] / self.wall_s, UNIX_TIME: self._unix_clock(), **of_causes}

    @property
    def wall_s(self) -> float:
        """Of all causes, up to the last change."""
        return sum(self._seconds.values())

    def describe(self) -> str:
        """The shares of all causes that took time, in one line."""
        self._add()
        shares = {cause: seconds / self.wall_s for cause, seconds in self._seconds.items()}
        lost = [f"{cause} {share:.1%}" for cause, share in shares.items() if cause != STEPS and share >= 0.0005]
        return f"{shares[STEPS]:.1%} of {self.wall_s:,.0f} s in steps; {', '.join(lost)}"

    def _add(self) -> None:
        now = self._clock()
        self._seconds[self._cause] += now - self._since
        self._since = now
