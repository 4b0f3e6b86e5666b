"""Errors for the user: what is wrong, and how to fix it."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from titanlite.runtime.text import visible, without_userinfo


class UserError(Exception):
    """An error that the user can fix. It is shown without a traceback.

    Each argument is a line of the message. What it quotes from files of strangers cannot begin another line, or control
    a terminal: it is `visible`.
    """

    def __str__(self) -> str:
        return "\n".join(visible(str(line)) for line in self.args)

    is_shared = False
    """Whether it is raised on all ranks with the same text, which rank 0 then prints."""
    may_pass = False
    """Whether its cause may end without the user, as for ranks that start late; see runtime.retry.may_pass."""


class UsageError(UserError):
    """Wrong command-line arguments or an invalid configuration. The process exits with code 2."""


class DataError(UserError):
    """The data of one sequence cannot be used. sequence: its index in the run, from 0, the same on every mesh."""

    def __init__(self, message: str, sequence: int) -> None:
        self.sequence = sequence
        super().__init__(message)


class LateRanksError(RuntimeError):
    """Ranks did not take part in an exchange in time. ranks: which ones, or the first of `number`."""

    def __init__(self, ranks: Sequence[int], timeout_s: float, number: int = 0) -> None:
        self.ranks = tuple(ranks)
        more = max(number, len(ranks)) - 1
        others = f" and {more} more" if more else ""
        super().__init__(f"no message within {timeout_s:g} s from rank {ranks[0]}{others}")


@dataclass(frozen=True)
class Problem:
    """One problem of a configuration.

    key: the full key, as in TOML and on the command line ("training.steps"). value: the given value, None if
    none is given. rule: the condition for valid values ("at least 1"). remedy: what to write instead. file: the one
    that sets the value, if it is not the file on the command line.
    """

    key: str
    value: Any
    rule: str
    remedy: str
    file: str = ""

    def __str__(self) -> str:
        given = "" if self.value is None else f" = {without_userinfo(repr(self.value))}"
        given += f" in {self.file}" if self.file else ""
        return "\n".join(map(visible, [f"{self.key}{given}", f"    rule:   {self.rule}", f"    remedy: {self.remedy}"]))


class ConfigError(UsageError):
    """All problems of one configuration or command line. The process exits with code 2."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        of_command = all(problem.key.startswith(("--", "argument ")) for problem in self.problems)
        checked = "command line" if of_command else "configuration"
        head = f"the {checked} has {count} problem{'s' if count > 1 else ''}"
        lines = [line for problem in self.problems for line in ("", *f"  {problem}".split("\n"))]
        super().__init__(head + ":", *lines)


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise ConfigError if there are problems."""
    if found := tuple(problems):
        raise ConfigError(found)


@dataclass
class Rules:
    """Collect the problems of one section: of rules that the range of a key cannot express.

    name: of the section or table, as in full keys ("training", "data.sources.0"); "--" for the options of a command.
    section: its dataclass, from which the rules take the value of a key.
    """

    name: str
    section: Any
    problems: list[Problem] = field(default_factory=list)

    def require(self, key: str, ok: object, rule: str, remedy: str) -> bool:
        """Add a problem of the key unless `ok`; returns whether it is. rule, remedy: see Problem."""
        if not ok:
            value = getattr(self.section, key)
            full = f"--{key.replace('_', '-')}" if self.name == "--" else f"{self.name}.{key}"
            self.problems.append(Problem(full, [*value] if isinstance(value, tuple) else value, rule, remedy))
        return bool(ok)

    def needs(self, key: str, ok: object, condition: str) -> bool:
        """Require a condition for a key that is given: what must hold for it to have an effect."""
        return self.require(key, ok, f"only with {condition}", "leave it out")

    def divides(self, key: str, divisor_key: str, divisor: int) -> bool:
        """Require that the value of the key is divisible by that of another one. The remedy has the nearest values."""
        value = getattr(self.section, key)
        nearest = dict.fromkeys((max(value // divisor, 1) * divisor, (value // divisor + 1) * divisor))
        remedy = f"set {self.name}.{key} = {' or '.join(map(str, nearest))}, or change {divisor_key.split(' ')[-1]}"
        return self.require(key, value % divisor == 0, f"divisible by {divisor_key} = {divisor}", remedy)


def integer_variable(name: str, default: int, *, least: int, most: int) -> int:
    """Read an integer from an environment variable; `default` if it is unset or empty. Raises UsageError."""
    text = os.environ.get(name, "")
    if not text:
        return default
    value = int(text) if text.isdecimal() and len(text) <= len(str(most)) else -1
    if not least <= value <= most:
        rule = f"set an integer from {least} to {most}, or unset {name}"
        raise UsageError(f"the environment sets {name}={text[:100]}: {rule}")
    return value


def is_error(error: BaseException) -> bool:
    """Whether it is no exit and no Ctrl-C. A library in Rust, such as tokenizers, raises a PanicException for a fault
    of its own, which is no Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
