"""No hostile input makes any command run code, write outside of its folders, ask a stranger's server, or end badly.

Each case is a process forked from one that has imported all modules. The default suite starts one command per input;
the soak test starts all commands that take an input of its kind.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from tests.security.buckets import upload
from tests.security.commands import STARTS, Kind
from tests.security.conftest import Server
from tests.security.guarded import Case, Guard
from tests.security.hostile import HOSTILE
from tests.security.running import problems_of, started
from tests.security.workplace import Workplace, write_clean
from titanlite.__main__ import COMMANDS

pytestmark = pytest.mark.slow
PRODUCT = [(name, command) for name, each in HOSTILE.items() for command, kinds in STARTS.items() if each.kind in kinds]
FIRST = {command: next(iter(kinds)) for command, kinds in STARTS.items() if kinds and command != "parity"}
"""A clean input of each command; parity starts ranks, which takes long."""


@pytest.fixture(scope="module")
def clean(guard: Guard, own_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace with a trained run, which no command may change."""
    place = Workplace(tmp_path_factory.mktemp("clean") / "place", own=own_server.url)
    write_clean(place)
    trained = guard.run(Case(("train", "mine.toml"), place.here, place.environment(), (place.root,)))
    assert trained.code == 0, trained.output
    return place


@pytest.fixture
def place(clean: Workplace, stranger: Server, own_server: Server, tmp_path: Path) -> Iterator[Workplace]:
    """A copy of the clean workplace, to be changed."""
    shutil.copytree(clean.root, tmp_path / "place", symlinks=True)
    yield Workplace(tmp_path / "place", stranger.url, own_server.url)
    requests, stranger.requests[:] = stranger.requests[:], []
    assert requests == []
    for folder in tmp_path.iterdir():
        shutil.rmtree(folder)


def fails(guard: Guard, place: Workplace, command: str, kind: Kind) -> str:
    """What is wrong with this command on this workplace, with its output; "" if nothing."""
    problems, outcome = problems_of(guard, place, started(place, command, kind))
    return "\n".join([*problems, f"exit code {outcome.code}", outcome.output]) if problems else ""


def test_all_commands_are_in_the_table() -> None:
    """A command that takes no input of others has an empty row."""
    assert list(STARTS) == list(COMMANDS)
    assert {kind for kinds in STARTS.values() for kind in kinds} == {each.kind for each in HOSTILE.values()}
    assert {each.kind for each in HOSTILE.values()} == set(get_args(Kind))
    assert [name for name, each in HOSTILE.items() if each.kind not in STARTS[each.command]] == []


@pytest.mark.parametrize(("command", "kind"), FIRST.items())
def test_a_clean_input_is_accepted(command: str, kind: Kind, guard: Guard, place: Workplace) -> None:
    """Otherwise the cases below would show nothing."""
    problems, outcome = problems_of(guard, place, started(place, command, kind))
    assert problems == []
    assert outcome.code == 0, outcome.output


@pytest.mark.soak
@pytest.mark.parametrize(
    ("command", "kind"), [(command, kind) for command, kinds in STARTS.items() for kind in kinds if kind != "bucket"]
)
def test_clean_inputs_of_all_kinds_are_accepted(command: str, kind: Kind, guard: Guard, place: Workplace) -> None:
    test_a_clean_input_is_accepted(command, kind, guard, place)


def prepared(name: str, command: str, guard: Guard, place: Workplace, request: pytest.FixtureRequest) -> None:
    """Make the hostile input."""
    each = HOSTILE[name]
    if each.kind == "cache":
        guard.run(started(place, command, "cache"))
        shutil.rmtree(place.out)
        place.out.mkdir()
    each.build(place)
    if each.kind == "bucket":
        upload(place, request.getfixturevalue("moto_server"))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_input(name: str, guard: Guard, place: Workplace, request: pytest.FixtureRequest) -> None:
    command = HOSTILE[name].command
    prepared(name, command, guard, place, request)
    assert not fails(guard, place, command, HOSTILE[name].kind)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "command"), PRODUCT)
def test_every_command_on_a_hostile_input(
    name: str, command: str, guard: Guard, place: Workplace, request: pytest.FixtureRequest
) -> None:
    prepared(name, command, guard, place, request)
    assert not fails(guard, place, command, HOSTILE[name].kind)
