"""Commands accept ordinary inputs; otherwise the tests with hostile ones would show nothing."""

from typing import get_args

import pytest

from tests.security.commands import STARTS, Kind
from tests.security.guarded import Guard
from tests.security.hostile import HOSTILE
from tests.security.running import problems_of, started
from tests.security.table import OF_DATA, OF_RUNS
from tests.security.workplace import Workplace
from titanlite.__main__ import COMMANDS

pytestmark = pytest.mark.slow
LONG = {"parity", "compare", "critical-batch", "profile"}
"""Commands that start ranks, several trainings or a trace."""
FIRST = {command: next(iter(kinds)) for command, kinds in STARTS.items() if kinds and command not in LONG}
"""A clean input of each other command."""


def test_all_commands_are_in_the_table() -> None:
    """A command that takes no input of others has an empty row."""
    assert list(STARTS) == list(COMMANDS)
    assert {kind for kinds in STARTS.values() for kind in kinds} == {each.kind for each in HOSTILE.values()}
    assert {each.kind for each in HOSTILE.values()} == set(get_args(Kind)) == {*OF_DATA, *OF_RUNS}
    assert [name for name, each in HOSTILE.items() if each.kind not in STARTS[each.command]] == []


@pytest.mark.parametrize(("command", "kind"), FIRST.items())
def test_a_clean_input_is_accepted(command: str, kind: Kind, guard: Guard, place: Workplace) -> None:
    problems, outcome = problems_of(guard, place, started(place, command, kind))
    assert problems == []
    assert outcome.code == 0, outcome.output


@pytest.mark.soak
@pytest.mark.parametrize(
    ("command", "kind"), [(command, kind) for command, kinds in STARTS.items() for kind in kinds if kind != "bucket"]
)
def test_clean_inputs_of_all_kinds_are_accepted(command: str, kind: Kind, guard: Guard, place: Workplace) -> None:
    test_a_clean_input_is_accepted(command, kind, guard, place)
