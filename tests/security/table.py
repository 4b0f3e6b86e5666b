"""The table: every hostile input, and the commands that are started on it."""

import shutil

import pytest

from tests.security.buckets import upload
from tests.security.commands import STARTS, Kind
from tests.security.guarded import Guard
from tests.security.hostile import HOSTILE
from tests.security.running import problems_of, started
from tests.security.workplace import Workplace

OF_DATA: tuple[Kind, ...] = ("model", "corpus", "tokenizer", "template", "task", "profile", "name", "folder", "cache")
"""The kinds of two test files, which two workers run at the same time."""
OF_RUNS: tuple[Kind, ...] = ("run", "bucket", "ladder")


def names_of(kinds: tuple[Kind, ...]) -> list[str]:
    """Hostile inputs of these kinds."""
    return [name for name, each in HOSTILE.items() if each.kind in kinds]


def product_of(kinds: tuple[Kind, ...]) -> list[tuple[str, str]]:
    """(hostile input, command) of all commands that take an input of its kind."""
    return [(name, command) for name in names_of(kinds) for command in STARTS if HOSTILE[name].kind in STARTS[command]]


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
