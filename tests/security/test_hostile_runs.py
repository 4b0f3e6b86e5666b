"""Nor does a hostile run.

Each case is a process forked from one that has imported all modules. The default suite starts one command per input;
the soak test starts all commands that take an input of its kind.
"""

import pytest

from tests.security.guarded import Guard
from tests.security.hostile import HOSTILE
from tests.security.table import OF_RUNS, names_of, problems_with, product_of
from tests.security.workplace import Workplace

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", names_of(OF_RUNS))
def test_a_hostile_input(name: str, guard: Guard, place: Workplace, request: pytest.FixtureRequest) -> None:
    assert not problems_with(name, HOSTILE[name].command, guard, place, request)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "command"), product_of(OF_RUNS))
def test_every_command_on_a_hostile_input(
    name: str, command: str, guard: Guard, place: Workplace, request: pytest.FixtureRequest
) -> None:
    assert not problems_with(name, command, guard, place, request)
