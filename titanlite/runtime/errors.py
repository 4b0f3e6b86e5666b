"""Errors that are written for a person: what is wrong, and what to do about it."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any


class UserError(Exception):
    """Something that the user can mend. Its text is the whole message; no traceback is shown with it."""


class DataError(UserError):
    """The data of one sequence cannot be used. sequence: its number in the run, from 0, the same on every mesh."""

    def __init__(self, message: str, sequence: int) -> None:
        self.sequence = sequence
        super().__init__(message)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration.

    key: the full key, as in TOML and on the command line ("training.steps"). value: what was given.
    rule: what holds for valid values ("at least 1"). remedy: what to write instead.
    """

    key: str
    value: Any
    rule: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r}\n    rule:   {self.rule}\n    remedy: {self.remedy}"


class ConfigError(UserError):
    """All problems of one configuration, in one report. The process ends with exit code 2."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = f"the configuration has {count} problem{'s' if count > 1 else ''}"
        super().__init__("\n\n".join([head + ":", *(f"  {problem}" for problem in self.problems)]))


def require(ok: bool, key: str, value: Any, rule: str, remedy: str) -> list[Problem]:
    """[] where `ok`, else the one Problem: checks read as a list of rules."""
    return [] if ok else [Problem(key, value, rule, remedy)]


@dataclass(frozen=True)
class Range:
    """The numbers that a key may have. unset: a value outside that is valid, too; it stands for what is chosen."""

    least: float | None
    above: float | None
    most: float | None
    below: float | None
    unset: float | None
    remedy: str

    def has(self, value: float) -> bool:
        return value == self.unset or not (
            (self.least is not None and value < self.least)
            or (self.above is not None and value <= self.above)
            or (self.most is not None and value > self.most)
            or (self.below is not None and value >= self.below)
        )

    def __str__(self) -> str:
        if self.least is not None and self.most is not None:
            text = f"from {_number(self.least)} to {_number(self.most)}"
        elif self.least == 0 and self.below is None:
            text = "0 or more"
        else:
            bounds = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
            text = " and ".join(f"{word} {_number(bound)}" for word, bound in bounds.items() if bound is not None)
        return text if self.unset is None else f"{_number(self.unset)} or {text}"


def ranged(
    default: Any,
    remedy: str = "leave it out for the default",
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    unset: float | None = None,
) -> Any:
    """A field of a section, whose values have a rule of their own; see Range."""
    return field(default=default, metadata={"range": Range(least, above, most, below, unset, remedy)})


def check_ranges(section: Any, name: str) -> list[Problem]:
    """Problems of the numbers of a section, or of one table, each by itself."""
    problems: list[Problem] = []
    for each in fields(section):
        if (rule := each.metadata.get("range")) is not None:
            value = getattr(section, each.name)
            problems += require(rule.has(value), f"{name}.{each.name}", value, str(rule), rule.remedy)
    return problems


def _number(value: float) -> str:
    return "2^63 - 1" if value == 2**63 - 1 else f"{value:,}" if isinstance(value, int) else f"{value:g}"
