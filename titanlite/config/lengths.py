"""Lengths of the run, the warm-up and the decay: by one of several keys, in steps, tokens or a percentage."""

from collections.abc import Collection, Mapping
from typing import Any

from titanlite.runtime.errors import Problem

LENGTHS = (
    ("training.steps", "training.tokens"),
    ("lr_schedule.decay_steps", "lr_schedule.decay_ratio", "lr_schedule.final_decay_steps"),
)
"""Keys of which only one is given."""

UNSET = -1


def override_lengths(tables: Mapping[str, dict[str, Any]], given: Collection[str]) -> None:
    """Remove a length from the tables of a file if another of its keys is given elsewhere: on the command line, or in a
    file that extends this one."""
    given = set(given)
    for keys in LENGTHS:
        if given.intersection(keys):
            for key in set(keys) - given:
                section, _, name = key.partition(".")
                tables.get(section, {}).pop(name, None)


def check_lengths(tables: Mapping[str, Mapping[str, Any]]) -> list[Problem]:
    """A Problem for each length that has several values. tables: of the file, overridden by the command line."""
    problems = []
    for keys in LENGTHS:
        parts = {key: key.partition(".") for key in keys}
        values = {key: tables.get(section, {}).get(name, UNSET) for key, (section, _, name) in parts.items()}
        given = [key for key in keys if values[key] != UNSET]
        if len(given) > 1:
            rule = f"only one of {', '.join(keys)}; {given[0]} = {values[given[0]]!r} is given, too"
            remedy = f"leave out all of {', '.join(given)} except one"
            problems.append(Problem(given[1], values[given[1]], rule, remedy))
    return problems
