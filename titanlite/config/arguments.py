"""The command line as words: which key got which text. Whether key and text are any good is decided elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titanlite.config.values import literal
from titanlite.runtime.errors import Problem

HELP = ("--help", "-h")


@dataclass(frozen=True)
class Arguments:
    """What was said on the command line.

    texts: key -> text, in the order given; None where a key came without a value. Keys given twice are not in it.
    problems: stray words, and keys given twice.
    """

    texts: dict[str, str | None]
    wants_help: bool
    problems: tuple[Problem, ...]


def split_arguments(argv: Sequence[str]) -> Arguments:
    """Split `--section.key value` and `--section.key=value`. A value after a space does not start with `--`."""
    texts: dict[str, list[str | None]] = {}
    problems: list[Problem] = []
    wants_help = False
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if word in HELP:
            wants_help = True
        elif not word.startswith("--") or word == "--":
            problems.append(_stray(word))
        else:
            key, equals, text = word[2:].partition("=")
            value: str | None = text if equals else None
            if not equals and position < len(argv) and not _is_flag(argv[position]):
                value = argv[position]
                position += 1
            texts.setdefault(key, []).append(value)
    problems += [_repeated(key, given) for key, given in texts.items() if len(given) > 1]
    return Arguments({key: given[0] for key, given in texts.items() if len(given) == 1}, wants_help, tuple(problems))


def missing_value(key: str, default: Any) -> Problem:
    """The Problem of a known key without a value; its default serves as an example."""
    example = (default or "TEXT") if isinstance(default, str) else literal(default)
    remedy = f"write --{key} {example}; a value that starts with -- is written --{key}=--VALUE"
    return Problem(key, "", "a value after its key", remedy)


def _is_flag(word: str) -> bool:
    return word.startswith("--") or word in HELP


def _stray(word: str) -> Problem:
    rule = "every word is a --section.key or the value after one"
    if word.startswith("-") and "." in word.strip("-."):
        remedy = f"write -{word}"
    elif "=" in word and "." in word.partition("=")[0]:
        remedy = f"write --{word}"
    elif word.endswith(".toml"):
        remedy = f"write --job.config_file {word}"
    else:
        remedy = """put its key before it, or remove it; several values of one key are one word: '["a", "b"]'"""
    return Problem("command line", word, rule, remedy)


def _repeated(key: str, given: list[str | None]) -> Problem:
    values = [text if text is not None else "" for text in given]
    choices = " or ".join(f"--{key}={text}" for text in dict.fromkeys(values))
    return Problem(key, values, "given once on the command line", f"keep one: {choices}")
