"""Split the command line of a training into the values of keys, and the options that have no key."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titanlite.config.fields import literal
from titanlite.config.files import CONFIG_FILE, shipped_names
from titanlite.runtime.errors import Problem

HELP = ("--help", "-h")


@dataclass(frozen=True)
class Arguments:
    """The parsed command line.

    texts: key -> text, in the given order; None if a key has no value. Repeated keys are left out.
    problems: unexpected arguments and repeated keys. has_config: whether a configuration is given, maybe twice.
    """

    texts: dict[str, str | None]
    wants_help: bool
    problems: tuple[Problem, ...]
    has_config: bool


def split_arguments(argv: Sequence[str]) -> Arguments:
    """Split `--section.key value` and `--section.key=value`; hyphens in keys count as underscores.

    A value after a space does not start with `--`. A switch without a value is true.

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
            if not equals and position < len(argv) and not _is_flag(argv[position]):
                value = argv[position]
                position += 1
            texts.setdefault(key, []).append(value)
    problems += [_repeated(key, given) for key, given in texts.items() if len(given) > 1]
    once = {key: given[0] for key, given in texts.items() if len(given) == 1}
    return Arguments(once, wants_help, tuple(problems), CONFIG_FILE in texts)


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
    values = [text if text is not None else "" for text in given]
    choices = " or ".join(f"--{key}={text}" for text in dict.fromkeys(values))
    return Problem(key, values, "given once on the command line", f"keep one: {choices}")
