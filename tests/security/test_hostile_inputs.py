"""No hostile input makes any command run code, write elsewhere, ask a stranger's server, or end badly; commands accept
ordinary inputs, otherwise this would show nothing.

Each case is a process forked from one that has imported all modules, which takes as long as 20 cases: so the tests are
in one file. The default suite starts one command per input, within a minute; the soak tests start all commands that
take an input of its kind.
"""

import shutil
from typing import get_args

import pytest

from tests.security.buckets import upload
from tests.security.commands import STARTS, Kind
from tests.security.guarded import Guard
from tests.security.hostile import HOSTILE
from tests.security.running import problems_of, started
from tests.security.workplace import Workplace
from titanlite.__main__ import COMMANDS

pytestmark = pytest.mark.slow

LONG = {"parity", "compare", "critical-batch", "profile"}
"""Commands that start ranks, several trainings or a trace."""
FIRST = {command: next(iter(kinds)) for command, kinds in STARTS.items() if kinds and command not in LONG}
"""A clean input of each other command."""
PRODUCT = [(name, command) for name, each in HOSTILE.items() for command in STARTS if each.kind in STARTS[command]]
"""(hostile input, command) of all commands that take an input of its kind."""


def test_all_commands_are_in_the_table() -> None:
    """A command that takes no input of others has an empty row."""
    assert list(STARTS) == list(COMMANDS)
    assert {kind for kinds in STARTS.values() for kind in kinds} == {each.kind for each in HOSTILE.values()}
    assert {each.kind for each in HOSTILE.values()} == set(get_args(Kind))
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


def problems_with(name: str, command: str, guard: Guard, place: Workplace, request: pytest.FixtureRequest) -> str:
    """Make the hostile input, start the command; what is wrong, with its output; "" if nothing."""
    each = HOSTILE[name]
    if each.kind == "cache":
        guard.run(started(place, command, "cache"))
        shutil.rmtree(place.out)
        place.out.mkdir()
    each.build(place)
    if each.kind == "bucket":
        upload(place, request.getfixturevalue("moto_server"))
    problems, outcome = problems_of(guard, place, started(place, command, each.kind))
    return "\n".join([*problems, f"exit code {outcome.code}", outcome.output]) if problems else ""


@pytest.mark.parametrize("name", [name for name, each in HOSTILE.items() if each.in_default_suite])
def test_a_hostile_input(name: str, guard: Guard, place: Workplace, request: pytest.FixtureRequest) -> None:
    assert not problems_with(name, HOSTILE[name].command, guard, place, request)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "command"), PRODUCT)
def test_every_command_on_a_hostile_input(
    name: str, command: str, guard: Guard, place: Workplace, request: pytest.FixtureRequest
) -> None:
    assert not problems_with(name, command, guard, place, request)
