"""Command lines: words are split by the options of a command, whose values are read as those of keys are.

The options of a command are the fields of a dataclass; `--section.key value` sets a key of the configuration.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from titanlite.config.files import CONFIG_FILE, shipped_names
from titanlite.config.value_types import Key, explain, missing_value, plain, value_from_text, value_type
from titanlite.runtime.errors import Problem
from titanlite.runtime.settings import setting, settings_of
from titanlite.runtime.text import ascii_form
from titanlite.storage.address import is_address

HELP = ("--help", "-h")
MAX_WORLD_SIZE = 2**20


EXAMPLES = {int: 1, float: 1.0}
"""For remedies, of options without a default."""


class Option(NamedTuple):
    """A field of the options of a command.

    key: the type, range and default of a value. takes: "nothing", a switch; "one" value; "words": one value or more;
    "repeated": one value each time that it is given. is_path: its values are paths. position: a label, if it is given
    without a name. excludes: at most one of the options that say so may be given.
    """

    key: Key
    takes: Literal["nothing", "one", "words", "repeated"]
    is_path: bool = False
    is_required: bool = False
    position: str = ""
    excludes: bool = False

    @property
    def is_several(self) -> bool:
        return self.takes in ("words", "repeated")


def options_of(kind: type) -> dict[str, Option]:
    """Name -> Option, of a dataclass with int, float, str, Path, bool, Literal, TYPE | None and tuple[TYPE, ...]."""
    found = {}
    hints, settings = get_type_hints(kind), settings_of(kind)
    for each in fields(kind):
        own, is_several = hints[each.name], get_origin(hints[each.name]) is tuple
        own = get_args(own)[0] if is_several or NoneType in get_args(own) else own
        example = EXAMPLES.get(own, "text") if each.default in (MISSING, None, ()) else plain(each.default)
        known = replace(settings[each.name], is_path=own is Path or settings[each.name].is_path)
        key = Key(str if own is Path else own, example, known)
        takes: Any = "nothing" if own is bool else "words" if is_several else "one"
        found[each.name] = Option(key, takes, own is Path, each.default is MISSING)
    return found


@dataclass(frozen=True)
class Words:
    """A split command line. given: name of an option, or key -> its texts, by time that it is given. others: words that
    belong to none. wants_help: whether one is --help or -h."""

    given: dict[str, list[list[str]]]
    others: list[str]
    wants_help: bool


def split(argv: Sequence[str], options: Mapping[str, Option]) -> Words:
    """Split `--name value` and `--name=value`; hyphens in names count as underscores.

    A value after a space does not start with `--`. An option of several takes the words up to the next `--`.
    """
    words = Words({}, [], any(word in HELP for word in argv))
    rest = [word for word in reversed(argv) if word not in HELP]
    while rest:
        word = rest.pop()
        if not word.startswith("--") or word == "--":
            words.others.append(word)
            if word.startswith("-") and "." in word and rest and not rest[-1].startswith("--"):
                rest.pop()  # the value of a key with one hyphen
            continue
        name, equals, text = word[2:].partition("=")
        name = re.sub(r"(?<=\w)-(?=\w)", "_", name)
        texts, takes = [text] * bool(equals), options[name].takes if name in options else "one"
        while not equals and takes != "nothing" and rest and not rest[-1].startswith("--"):
            texts.append(rest.pop())
            if takes != "words":
                break
        words.given.setdefault(name, []).append(texts)
    return words


def option_values(options: Mapping[str, Option], words: Words, command: str) -> tuple[dict[str, Any], list[Problem]]:
    """(values of options that are given, problems of options). command: "titanlite plan", for remedies."""
    values: dict[str, Any] = {}
    problems = [_unknown(name, times, options, command) for name, times in words.given.items() if name not in options]
    others = list(words.others)
    for name, option in options.items():
        times = words.given.get(name, [])
        if option.position:
            times = [others[:] if option.is_several else others[:1]] if others else []
            del others[: len(times[0]) if times else 0]
        if problem := _times_problem(name, option, times, command):
            problems.append(problem)
        elif times:
            texts = [text for time in times for text in time]
            found = [value_from_text(text, option.key.type) for text in texts] or [True]
            read = [read_value(_flag(name, option), value, option) for value in found]
            wrong = [value for value in read if isinstance(value, Problem)]
            problems += wrong
            values |= {} if wrong else {name: tuple(read) if option.is_several else read[0]}
    rule = f"every argument is an option of {command} or its value"
    problems += [unexpected(word, rule, f"see {command} --help") for word in others]
    excluding = [name for name, option in options.items() if option.excludes and name in words.given]
    if len(excluding) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in excluding[:2])
        problems.append(Problem(second, None, f"not together with {first}", "give one of them"))
    return values, problems


def check_values(options: Any, known: Mapping[str, Option]) -> list[Problem]:
    """Problems of the values of an options dataclass that a program has filled."""
    found = []
    for name, option in known.items():
        value, default = getattr(options, name), type(options).__dataclass_fields__[name].default
        if value is not default and value != default:
            items = value if option.is_several else [value]
            found += [read_value(_flag(name, option), item, option) for item in items]
    return [each for each in found if isinstance(each, Problem)]


def read_value(name: str, value: Any, option: Option) -> Any:
    """One value of an option, or its Problem."""
    value = plain(value)
    if option.is_path and value == "":
        return Problem(name, value, "a path", f"write {name} PATH")
    if option.is_path and isinstance(value, str) and is_address(value):
        return Problem(name, value, "a path on a disk, not the address of a store", f"write {name} PATH")
    try:
        read = TypeAdapter(value_type(option.key)).validate_python(value)
    except ValidationError as error:
        return explain(name, value, option.key, error.errors()[0]["type"])
    return Path(read) if option.is_path else read


def _flag(name: str, option: Option) -> str:
    return f"argument {option.position}" if option.position else f"--{name.replace('_', '-')}"


def _times_problem(name: str, option: Option, times: Sequence[Sequence[str]], command: str) -> Problem | None:
    """The problem of how often, and with how many texts, an option is given."""
    flag = _flag(name, option)
    if not times:
        return Problem(flag, None, "must be given", f"see {command} --help") if option.is_required else None
    if len(times) > 1 and not option.is_several:
        return repeated(flag, times)
    if option.takes == "nothing":
        return Problem(flag, times[0][0], "a switch without a value", f"write {flag}") if times[0] else None
    example = "VALUE" if option.is_path else option.key.default
    return missing_value(flag, example) if not all(times) else None


def _unknown(name: str, times: Sequence[Sequence[str]], options: Mapping[str, Option], command: str) -> Problem:
    close = get_close_matches(name, [known for known, option in options.items() if not option.position], 1)
    remedy = f"did you mean --{close[0].replace('_', '-')}?" if close else f"see {command} --help"
    texts = [text for time in times for text in time]
    return Problem(f"--{name.replace('_', '-')}", texts[0] if texts else None, f"an option of {command}", remedy)


def unexpected(word: str, rule: str, remedy: str) -> Problem:
    """The Problem of a word that belongs to no option. remedy: if nothing better can be guessed."""
    typed = "".join(map(ascii_form, word))
    if typed.startswith("-") and "." in typed.strip("-."):
        remedy = f"write --{typed.lstrip('-')}"
    elif "=" in word and "." in word.partition("=")[0]:
        remedy = f"write --{word}"
    return Problem(f"argument {word!r}", None, rule, remedy)


def repeated(flag: str, times: Sequence[Sequence[str]]) -> Problem:
    """The Problem of an option or key that is given several times. flag: with its hyphens, or the full key."""
    written = flag if flag.startswith("--") else f"--{flag}"
    texts = [" ".join(time) for time in times]
    choices = dict.fromkeys(f"{written}={text}" if time else written for time, text in zip(times, texts, strict=True))
    rule = "given once on the command line"
    return Problem(flag, texts if any(texts) else None, rule, f"keep one: {' or '.join(choices)}")


@dataclass(frozen=True)
class Options:
    """Options of the training command that are no keys. The first four train nothing: previews."""

    print_config: bool = False
    """Print the resolved configuration as TOML, with the origin of each value, and exit."""
    check: bool = False
    """Check the configuration and its files, for --world-size processes, and exit."""
    dry_run: bool = False
    """Print the plan, the memory and the first sequences as text, and exit."""
    write_slurm: Path | None = setting(None, "write --write-slurm job.sbatch", is_path=True)
    """Check the configuration for --world-size processes, write the script of a Slurm job that trains it into this new
    file, and exit."""
    strict: bool = False
    """Refuse settings that have no effect."""
    world_size: int | None = setting(None, "write --world-size 8 for 8 processes", least=1, most=MAX_WORLD_SIZE)
    """With one of the first four: number of processes, in place of that of the launcher."""
    device: Literal["cuda", "cpu"] | None = None
    """With one of the first four: type of the devices, in place of this machine's."""

    @property
    def preview(self) -> str:
        """The option in place of a training, "" without one."""
        return next((f"--{name.replace('_', '-')}" for name in PREVIEWS if getattr(self, name)), "")


PREVIEWS = ("print_config", "check", "dry_run", "write_slurm")
TRAIN_OPTIONS = {name: option._replace(excludes=name in PREVIEWS) for name, option in options_of(Options).items()}


@dataclass(frozen=True)
class Arguments:
    """The parsed command line of a training.

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
    """Split the command line of a training into keys and options.

    One argument may be the configuration itself: the first one, a path ending in .toml, or a shipped name.
    """
    words = split(argv, TRAIN_OPTIONS)
    of_options = {name: words.given.pop(name) for name in TRAIN_OPTIONS if name in words.given}
    is_first = [word is argv[0] for word in words.others]
    configs = [
        word
        for word, first in zip(words.others, is_first, strict=True)
        if not word.startswith("-") and "=" not in word and (first or word.endswith(".toml") or word in shipped_names())
    ]
    keys = words.given
    if configs:
        keys[CONFIG_FILE] = [[word] for word in configs] + keys.get(CONFIG_FILE, [])
    rule = "every argument is CONFIG, a --section.key or its value"
    remedy = """remove it, or write --section.key VALUE; an array is one argument: '["a", "b"]'"""
    problems = [unexpected(word, rule, remedy) for word in words.others if word not in configs]
    problems += [repeated(key, times) for key, times in keys.items() if len(times) > 1]
    values, of_values = option_values(TRAIN_OPTIONS, Words(of_options, [], False), "titanlite train")
    options = Options(**values)
    problems += of_values
    if of_options.keys().isdisjoint(PREVIEWS):
        rule = "only with --check, --print-config, --dry-run or --write-slurm: the launcher decides for a training"
        remedy = "add --check, or start as many processes with torchrun or NGPU"
        alone = [name for name in ("device", "world_size") if name in values]
        problems += [Problem(f"--{name.replace('_', '-')}", values[name], rule, remedy) for name in alone]
    once = {key: (times[0][0] if times[0] else None) for key, times in keys.items() if len(times) == 1}
    return Arguments(once, words.wants_help, tuple(problems), CONFIG_FILE in keys, options)
