"""Translate a torchtitan configuration into the text of a titanlite TOML."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from titanlite.config.fields import SECTIONS, fields_of, literal
from titanlite.config.schema import JobConfig
from titanlite.runtime.errors import ConfigError, Problem
from titanlite.tools.from_torchtitan.rules import Rule, Settings, Translation
from titanlite.tools.from_torchtitan.table import GENERAL, OPTIONAL, RENAMED, RULES

DEFAULTS: dict[str, Any] = {key: default for rule in RULES for key, default in rule.keys.items()}
OWN_DEFAULTS = JobConfig()
WIDTH = 120
PAGE = "docs/from-torchtitan.md"


@dataclass(frozen=True)
class Line:
    """A key of titanlite. notes: comments above it. origin: torchtitan's keys, a comment after it."""

    value: Any
    notes: Sequence[str]
    origin: str


@dataclass(frozen=True)
class Translated:
    """text: of the TOML. fill_in: what the user must write. lost: keys without counterpart. unknown: keys that
    torchtitan does not have."""

    text: str
    fill_in: Sequence[str]
    lost: Sequence[str]
    unknown: Sequence[str]


def translate(document: Mapping[str, Any], name: str) -> Translated:
    """The TOML with the meaning of `document`. name: of its file. Raises ConfigError for values of a wrong type."""
    written = dict(flatten(document))
    current, renamed = current_names(written)
    unknown = {key: value for key, value in current.items() if key not in DEFAULTS}
    settings = Settings(DEFAULTS | current, current.keys() & DEFAULTS.keys())
    if problems := check_types(settings):
        raise ConfigError(problems)
    lines: dict[str, Line] = {}
    fill_in: list[str] = []
    lost: list[str] = []
    idle: list[str] = []
    for rule in RULES:
        given = [key for key in rule.keys if key in settings.given]
        if not rule.targets:
            idle += [key for key in given if settings[key] == DEFAULTS[key]]
            lost += [f"{key} = {literal_of(settings[key])}: {rule.note}" for key in given if key not in idle]
            continue
        translation = rule.translate(settings)
        lines |= lines_of(rule, translation, given, settings)
        used = is_used(rule, given, settings)
        fill_in += [translation.fill_in] if translation.fill_in and used else []
        lost += [f"{_pairs(given or rule.keys, settings)}: {translation.lost}."] if translation.lost and used else []
    unknown_texts = [f"{key} = {literal_of(value)}{did_you_mean(key)}" for key, value in unknown.items()]
    head = header(name, fill_in, lost, idle, renamed, unknown_texts)
    return Translated("\n".join([*head, *body(lines)]) + "\n", fill_in, lost, unknown_texts)


def is_used(rule: Rule, given: Sequence[str], settings: Settings) -> bool:
    """Whether the rule has an effect: the file has one of its keys, or what it is about is enabled."""
    return bool(given) or (rule.fills and (not rule.switch or bool(settings[rule.switch])))


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(full key, value) of all keys, in the order of the file."""
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{key}.")
        elif not isinstance(value, dict):
            yield key, value


def current_names(written: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(values by the names of torchtitan 0.2.2, texts about older names). A current name has precedence."""
    current = {key: value for key, value in written.items() if key not in RENAMED}
    texts = []
    for key, value in written.items():
        if key in RENAMED:
            name = RENAMED[key]
            texts.append(f"{key}: in 0.2.2, {name}" + (", which the file has, too: ignored" if name in current else ""))
            current.setdefault(name, value)
    return current, texts


def check_types(settings: Settings) -> list[Problem]:
    """Problems of values that torchtitan would not accept, of keys with a counterpart."""
    problems: list[Problem] = []
    for rule in RULES:
        for key in [key for key in rule.keys if key in settings.given and rule.targets]:
            value, default = settings[key], DEFAULTS[key]
            wanted = OPTIONAL.get(key, type(default))
            kinds = wanted if isinstance(wanted, tuple) else (wanted,)
            if float in kinds:
                kinds = (*kinds, int)
            valid = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
            names = " or ".join(kind.__name__ for kind in kinds)
            if not valid:
                problems.append(Problem(key, value, f"in torchtitan, a value of type {names}", "fix the file"))
    if not problems:
        for key in ("training.local_batch_size", "training.global_batch_size"):
            remedy = "fix the file: torchtitan refuses it as well"
            is_positive = settings[key] >= 1 or (settings[key] == -1 and key != "training.local_batch_size")
            if not is_positive:
                problems.append(Problem(key, settings[key], "a positive number of sequences", remedy))
    return problems


def lines_of(rule: Rule, translation: Translation, given: Sequence[str], settings: Settings) -> dict[str, Line]:
    """The keys to write, and their comments: those of the file, and those whose default differs from titanlite's."""
    if not is_used(rule, given, settings):
        return {}
    written = {key: value for key, value in translation.values.items() if given or value != default_of(key)}
    notes = [note for note in (rule.note, translation.remark) if note]
    lines = {}
    for number, (key, value) in enumerate(written.items()):
        names = given or list(rule.keys)
        origin = "" if key in names else ", ".join(names)
        if rule.keys and not given:
            origin = f"{origin}, torchtitan's default" if origin else "torchtitan's default"
        lines[key] = Line(value, [] if number else notes, origin)
    return lines


def default_of(key: str) -> Any:
    """titanlite's default; None for a hyper-parameter, which a flavor decides."""
    section, _, name = key.partition(".")
    value = getattr(getattr(OWN_DEFAULTS, section), name, None)
    return value if name not in ("family", "flavor") else None


def did_you_mean(key: str) -> str:
    """ "; did you mean ...?" for a key that torchtitan does not have; empty if none is similar."""
    name = key.rpartition(".")[2]
    same_name = [known for known in DEFAULTS if known.rpartition(".")[2] == name]
    siblings = [known for known in DEFAULTS if known.rpartition(".")[0] == key.rpartition(".")[0]]
    close = same_name or get_close_matches(key, siblings, 1, 0.75) or get_close_matches(key, DEFAULTS, 1, 0.8)
    return f" (did you mean {close[0]}?)" if close else ""


def header(
    name: str,
    fill_in: Sequence[str],
    lost: Sequence[str],
    idle: Sequence[str],
    renamed: Sequence[str],
    unknown: Sequence[str],
) -> list[str]:
    """The comments at the top of the file."""
    start = (
        f"{name} of torchtitan 0.2, by titanlite from-torchtitan. After a key: torchtitan's name, if it differs, and "
        "whether the value is its default, which the file did not have."
    )
    blocks = {
        "Fill in before training:": fill_in,
        "Without counterpart:": lost,
        "Without counterpart, and at torchtitan's default, so nothing to do:": [", ".join(idle)] if idle else [],
        "Older names of keys:": renamed,
        "Ignored, since torchtitan 0.2 has no such keys:": unknown,
        f"Differences that no key has ({PAGE}):": [f"{topic}: {text}" for topic, text in GENERAL],
    }
    lines = comment(start)
    for title, texts in blocks.items():
        if texts:
            lines += ["#", *comment(title)]
            for text in texts:
                lines += comment(text, "#   ", "#     ")
    return lines


def body(lines: Mapping[str, Line]) -> list[str]:
    """The sections with their keys, in the order of titanlite."""
    text = []
    for section, kind in SECTIONS.items():
        keys = [key for key in lines if key.partition(".")[0] == section]
        order = list(fields_of(kind()))
        keys.sort(key=lambda key: order.index(name) if (name := key.partition(".")[2]) in order else len(order))
        tables = [key for key in keys if is_rows(lines[key].value)]
        plain = [key for key in keys if key not in tables]
        text += ["", f"[{section}]"] if plain else []
        for key in plain:
            text += _lines(lines[key], key.partition(".")[2])
        for key in tables:
            text += ["", *(line for note in lines[key].notes for line in comment(note))]
            for row in lines[key].value:
                text += [f"[[{key}]]" + (f"  # {lines[key].origin}" if lines[key].origin else "")]
                text += [f"{name} = {literal(value)}" for name, value in row.items()]
    return text


def is_rows(value: Any) -> bool:
    """Whether the value is an array of tables."""
    return isinstance(value, tuple) and bool(value) and all(isinstance(row, dict) for row in value)


def _lines(line: Line, name: str) -> list[str]:
    text = f"{name} = {literal(line.value)}"
    return [
        *(part for note in line.notes for part in comment(note)),
        text + (f"  # {line.origin}" if line.origin else ""),
    ]


def comment(text: str, first: str = "# ", rest: str = "# ") -> list[str]:
    """Comment lines of at most WIDTH characters. Characters that a TOML comment must not have are replaced."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    return textwrap.wrap(
        printable, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _pairs(keys: Sequence[str] | Mapping[str, Any], settings: Settings) -> str:
    return ", ".join(f"{key} = {literal_of(settings[key])}" for key in keys)


def literal_of(value: Any) -> str:
    """The value as in a TOML file; Python's form for dates and for values that are not set."""
    try:
        return literal(value)
    except TypeError:
        return str(value)
