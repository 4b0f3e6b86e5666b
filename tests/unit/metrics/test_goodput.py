"""Wall time by cause, without gaps and over restarts."""

from pathlib import Path
from typing import Any

import pytest

from titanlite.metrics.timing import CAUSES, COLUMNS, PHASES, Goodput


class Clock:
    """A clock that is set by hand. boot: what the unix clock shows at 0."""

    def __init__(self, boot: float = 1e9) -> None:
        self.now, self.boot = 0.0, boot

    def __call__(self) -> float:
        return self.now

    def unix(self) -> float:
        return self.boot + self.now


def started(clock: Clock, earlier: dict[str, Any], began: float) -> Goodput:
    return Goodput(earlier, began=began, clock=clock, unix_clock=clock.unix)


def pass_phases(goodput: Goodput, clock: Clock, *phases: tuple[str, float]) -> None:
    for phase, seconds in phases:
        goodput.enter(phase)
        clock.now += seconds


NOTHING = dict.fromkeys(CAUSES, 0.0)
STEP = ("forward, backward and update", 10.0)


def seconds_of(columns: dict[str, float]) -> dict[str, float]:
    return {cause: columns[f"time_s/{cause}"] for cause in CAUSES}


def test_all_of_the_wall_time_is_divided_among_the_causes() -> None:
    """Until the first step, waiting for data is a part of the start."""
    clock = Clock()
    clock.now = 7.0
    goodput = started(clock, {}, began=4.0)
    pass_phases(goodput, clock, ("waiting for data", 2.0), STEP, ("logging", 1.0), ("comparing replicas", 0.5))
    pass_phases(goodput, clock, ("saving", 3.0), ("validating", 4.0), ("sampling", 0.25))
    pass_phases(goodput, clock, ("waiting for data", 6.0), STEP)
    columns = goodput.columns()
    assert tuple(columns) == COLUMNS
    lost = {"start": 5.0, "data": 6.0, "saving": 3.0, "validation": 4.0, "other": 0.75}
    assert seconds_of(columns) == NOTHING | lost | {"steps": 21.0}
    assert sum(seconds_of(columns).values()) == goodput.wall_s == clock.now - 4.0
    assert columns["goodput"] == 21.0 / 39.75
    assert columns["unix_time"] == clock.unix()
    expected = "52.8% of 40 s in steps; start 12.6%, data 15.1%, saving 7.5%, validation 10.1%, other 1.9%"
    assert goodput.describe() == expected


def test_a_restart_continues_from_the_row_of_the_resumed_step() -> None:
    """Steps after this row, which are computed again, and the time without a process are lost by the restart."""
    first = Clock()
    goodput = started(first, {}, began=0.0)
    pass_phases(goodput, first, STEP)
    row = {"step": 1, **goodput.columns()}
    pass_phases(goodput, first, STEP)  # lost
    second = Clock(boot=first.unix() + 100 - 50)  # 100 s later, by a process whose clock shows 50
    second.now = 50.0
    again = started(second, row, began=45.0)
    second.now += 5.0
    pass_phases(again, second, ("waiting for data", 1.0), STEP)
    seconds = seconds_of(again.columns())
    assert seconds == NOTHING | {"steps": 20.0, "restart": 10.0 + 100 + 5 + 1}
    assert again.wall_s == second.unix() - 1e9


def test_a_clock_that_was_set_back_loses_nothing() -> None:
    clock = Clock(boot=0.0)
    again = started(clock, {"unix_time": 5e9, "time_s/steps": 3.0}, began=-2.0)
    assert seconds_of(again.columns()) == NOTHING | {"steps": 3.0, "restart": 2.0}


@pytest.mark.parametrize("row", [{}, {"step": 3, "loss": 1.0}])
def test_rows_of_an_earlier_version_have_no_times(row: dict[str, Any]) -> None:
    clock = Clock()
    goodput = started(clock, row, began=0.0)
    pass_phases(goodput, clock, STEP)
    assert goodput.columns()["goodput"] == 1.0


def test_phases_are_those_of_the_training_loop() -> None:
    source = (Path(__file__).parents[3] / "titanlite" / "train.py").read_text()
    assert [phase for phase in PHASES if f'"{phase}"' not in source] == []
