"""Errors that are written for a person: what is wrong, and what to do about it."""

from collections.abc import Iterable
from dataclasses import dataclass
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
