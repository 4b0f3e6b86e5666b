"""Write a configuration as TOML, with the origin of each value as a comment if wanted."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import tomli_w

from titanlite.config.fields import SECTIONS, fields_of, setting_of, value_of
from titanlite.config.lengths import LENGTHS, UNSET
from titanlite.config.schema import JobConfig
from titanlite.config.value_types import literal
from titanlite.models.family import ModelConfig, resolve_model

COMMAND_LINE = "command line"
"""The origin of a value that the command line sets."""

Comment = Callable[[str, Any], str]
"""The comment of a line, for its full key and its value; "" for none."""


def dump_config(config: JobConfig) -> str:
    """TOML that reads back as `config`. Tables in arrays are without defaults."""
    return tomli_w.dumps(tables_of(config))


def tables_of(config: JobConfig) -> dict[str, dict[str, Any]]:
    """The configuration as the tables of TOML. Tables in arrays are without defaults."""
    tables = {section: fields_of(getattr(config, section)) for section in SECTIONS}
    tables["model"] |= tables["model"].pop("overrides")
    if kept := tables["model"].pop("kept"):
        of_flavor = {name: tables["model"][name] for name in ("family", "flavor")}  # see titanlite/config/begun.py
        tables["model"]["kept"] = of_flavor | kept
    return {section: {key: _plain(value) for key, value in table.items()} for section, table in tables.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        defaults = fields_of(type(value)())
        return {key: _plain(item) for key, item in fields_of(value).items() if key == "kind" or item != defaults[key]}
    return value


def print_config(
    given: JobConfig, kept: JobConfig, config: JobConfig, origins: Mapping[str, str], chosen_later: Collection[str]
) -> str:
    """TOML of all keys that reads back as `config`, with the origin of each value as a comment.

    given: as read. kept: with the values that the run has from an earlier start. config: resolved. origins: full key
    that is given -> its file, or COMMAND_LINE. chosen_later: keys of which the start of the run will choose those that
    are not given; they are comments.
    """
    labels = _labels(origins)

    def comment(key: str, value: Any) -> str:
        where = labels[origins[key]] if key in origins else _default(key, config)
        before, after = value_of(given, key), value_of(kept, key)
        if before != after:
            return f"kept from the run in {config.job.dump_folder}"
        others = [other for keys in LENGTHS if key in keys for other in keys if other in origins]
        if others and key not in origins and value != UNSET:
            return f"resolved from {others[0]} ({labels[origins[others[0]]]})"
        if before == value:
            return where
        if value == UNSET:
            steps = "training.steps" if key == "training.tokens" else "from_step"
            return f"{literal(before)} ({where}), resolved to {steps}"
        if isinstance(before, str) and isinstance(value, int):
            return f"{before} ({where})"
        automatic = literal(before).strip(chr(34))
        return f"{automatic}{': ' if automatic else ''}{setting_of(key).automatic or literal(value).strip(chr(34))}"

    open_keys = {key for key in chosen_later if key not in origins}
    return "\n".join(_lines(config, comment, open_keys)) + "\n"


def _lines(config: JobConfig, comment: Comment, as_comments: Collection[str]) -> Iterator[str]:
    """The lines of a TOML file with all keys. as_comments: keys that are left out."""

    def line(path: str, name: str, value: Any) -> str:
        text, note = f"{name} = {literal(value)}", comment(path, value)
        hidden = "# " if path in as_comments else ""
        return hidden + (f"{text}  # {_printable(note)}" if note else text)

    for number, section in enumerate(SECTIONS):
        values = getattr(config, section)
        table = fields_of(values)
        if isinstance(values, ModelConfig):
            del table["overrides"], table["kept"]
            table |= fields_of(resolve_model(values)[1])
        yield from ["", f"[{section}]"] if number else [f"[{section}]"]
        rows = {
            key: value for key, value in table.items() if value and isinstance(value, tuple) and is_dataclass(value[0])
        }
        yield from (line(f"{section}.{key}", key, value) for key, value in table.items() if key not in rows)
        for key, tables in rows.items():
            for index, row in enumerate(tables):
                yield from ["", f"[[{section}.{key}]]"]
                yield from (
                    line(f"{section}.{key}.{index}.{name}", name, value) for name, value in fields_of(row).items()
                )


def _default(key: str, config: JobConfig) -> str:
    """The origin of a value that is not given."""
    section, _, name = key.partition(".")
    if section != "model" or name in ("family", "flavor"):
        return "default"
    return f"flavor {config.model.flavor}{', when the run began' if name in config.model.kept else ''}"


def _labels(origins: Mapping[str, str]) -> dict[str, str]:
    """Origin -> its label: the name of a file if no other file has it, else its path."""
    files = {origin for origin in origins.values() if origin != COMMAND_LINE}
    names = [Path(file).name for file in files]
    labels = {file: Path(file).name if names.count(Path(file).name) == 1 else file for file in files}
    return labels | {COMMAND_LINE: COMMAND_LINE}


def _printable(comment: str) -> str:
    """A comment without control characters, which names of files may have."""
    return "".join(character if character.isprintable() else "?" for character in comment)
