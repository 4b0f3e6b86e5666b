"""Split the command line of a training into the values of keys, and the options that have no key."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from titanlite.config.fields import literal
from titanlite.config.files import CONFIG_FILE, shipped_names
from titanlite.runtime.errors import Problem

HELP = ("--help", "-h")
DEVICES = ("cuda", "cpu")


@dataclass(frozen=True)
class Options:
    """Options of the training command that are no keys. The first three print, and train nothing: previews."""

    print_config: bool = False
    """Print the resolved configuration as TOML, with the origin of each value, and exit."""
    check: bool = False
    """Check the configuration and its files, for --world-size processes, and exit."""
    dry_run: bool = False
    """Print the plan, the memory and the first sequences as text, and exit."""
    strict: bool = False
    """Refuse settings that have no effect."""
    world_size: int | None = None
    """With one of the first three: number of processes, in place of that of the launcher."""
    device: Literal["cuda", "cpu"] | None = None
    """With one of the first three: type of the devices, in place of this machine's."""

    @property
    def preview(self) -> str:
        """The option that prints, "" without one."""
        return next((f"--{name.replace('_', '-')}" for name in PREVIEWS if getattr(self, name)), "")


PREVIEWS = ("print_config", "check", "dry_run")
SWITCHES = (*PREVIEWS, "strict")
OPTIONS = (*SWITCHES, "world_size", "device")
MAX_WORLD_SIZE = 2**20


@dataclass(frozen=True)
class Arguments:
    """The parsed command line.

    texts: key -> text, in the given order; None if a key has no value. Repeated keys are left out.
    problems: unexpected arguments, repeated keys, wrong options. has_config: whether a configuration is given, maybe
    twice.
    """

    texts: dict[str, str | None]
    wants_help: bool
    problems: tuple[Problem, ...]
    has_config: bool
    options: Options = field(default_factory=Options)


def split_arguments(argv: Sequence[str]) -> Arguments:
    """Split `--section.key value` and `--section.key=value`; hyphens in keys count as underscores.

    A value after a space does not start with `--`. A switch without a value is true. Options have no section.

    One argument may be the configuration itself: the first one, a path ending in .toml, or a shipped name.
    """
    texts: dict[str, list[str | None]] = {}
    problems: list[Problem] = []
    wants_help = False
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if word in HELP:
            wants_help = True
        elif _may_be_path(word) and (position == 1 or word.endswith(".toml") or word in shipped_names()):
            texts.setdefault(CONFIG_FILE, []).append(word)
        elif not word.startswith("--") or word == "--":
            problems.append(_unexpected(word))
            if word.startswith("-") and "." in word and position < len(argv) and not _is_flag(argv[position]):
                position += 1  # the value of a key with one hyphen
        else:
            key, equals, text = word[2:].partition("=")
            key = re.sub(r"(?<=\w)-(?=\w)", "_", key)
            value: str | None = text if equals else None
            if not equals and key not in SWITCHES and position < len(argv) and not _is_flag(argv[position]):
                value = argv[position]
                position += 1
            texts.setdefault(key, []).append(value)
    problems += [_repeated(key, given) for key, given in texts.items() if len(given) > 1]
    once = {key: given[0] for key, given in texts.items() if len(given) == 1}
    options = _options({name: once.pop(name) for name in OPTIONS if name in once}, problems)
    return Arguments(once, wants_help, tuple(problems), CONFIG_FILE in texts, options)


def _options(given: dict[str, str | None], problems: list[Problem]) -> Options:
    """The options; adds their problems."""
    values: dict[str, Any] = {}
    for name, text in given.items():
        flag = f"--{name.replace('_', '-')}"
        if name in SWITCHES:
            if text is not None:
                problems.append(Problem(flag, text, "a switch without a value", f"write {flag}"))
            values[name] = True
        elif name == "device":
            if text not in DEVICES:
                problems.append(Problem(flag, text, f"one of {', '.join(DEVICES)}", f"write {flag} cuda"))
            values[name] = text
        elif text is None or not text.isdecimal() or len(text) > 7 or not 1 <= int(text) <= MAX_WORLD_SIZE:
            rule = f"a number of processes from 1 to {MAX_WORLD_SIZE:,}"
            problems.append(Problem(flag, text, rule, f"write {flag} 8 for 8 processes"))
        else:
            values[name] = int(text)
    previews = [f"--{name.replace('_', '-')}" for name in PREVIEWS if name in given]
    if len(previews) > 1:
        problems.append(Problem(previews[1], None, f"not together with {previews[0]}", "give one of them"))
    for name in sorted(given.keys() & {"world_size", "device"}) if not previews else ():
        rule = "only with --check, --print-config or --dry-run: the launcher decides for a training"
        remedy = "add --check, or start as many processes with torchrun or NGPU"
        problems.append(Problem(f"--{name.replace('_', '-')}", given[name], rule, remedy))
    return Options(**values)


def missing_value(key: str, default: Any) -> Problem:
    """The Problem of a known key without a value; the remedy has the default as an example."""
    if isinstance(default, str):
        remedy = f"write --{key} {default or 'TEXT'}; for a value that starts with --, write --{key}=--VALUE"
    else:
        remedy = f"write --{key} {literal(default)}"
    return Problem(key, None, "needs a value", remedy)


def _is_flag(word: str) -> bool:
    return word.startswith("--") or word in HELP


def _may_be_path(word: str) -> bool:
    return not word.startswith("-") and "=" not in word


def _unexpected(word: str) -> Problem:
    rule = "every argument is CONFIG, a --section.key or its value"
    if word.startswith("-") and "." in word.strip("-."):
        remedy = f"write -{word}"
    elif "=" in word and "." in word.partition("=")[0]:
        remedy = f"write --{word}"
    else:
        remedy = """remove it, or write --section.key VALUE; an array is one argument: '["a", "b"]'"""
    return Problem(f"argument {word!r}", None, rule, remedy)


def _repeated(key: str, given: list[str | None]) -> Problem:
    flag = f"--{key.replace('_', '-')}" if key in OPTIONS else f"--{key}"
    values = [text if text is not None else "" for text in given]
    choices = " or ".join(flag if text is None else f"{flag}={text}" for text in dict.fromkeys(given))
    name, value = (flag if key in OPTIONS else key), (values if any(values) else None)
    return Problem(name, value, "given once on the command line", f"keep one: {choices}")
