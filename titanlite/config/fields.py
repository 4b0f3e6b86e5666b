"""Types of keys, values as TOML, and values from the text of a command line."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import tomli

from titanlite.config.schema import JobConfig
from titanlite.data.kinds import KINDS
from titanlite.data.sources.config import SourceConfig
from titanlite.metrics.config import LOGGERS, PLUGIN_LOGGERS, MetricsConfig
from titanlite.models.head import LossConfig
from titanlite.models.losses import LOSSES
from titanlite.models.registry import FAMILIES
from titanlite.optim.optimizer import GroupConfig, OptimizerConfig
from titanlite.optim.registry import OPTIMIZERS
from titanlite.optim.schedule import DECAY_SHAPES, ScheduleConfig
from titanlite.runtime.json_files import check_depth
from titanlite.runtime.settings import Affects, Range, Setting, settings_of

TABLES: Mapping[type, Mapping[str, Sequence[Iterable[str]]]] = {
    SourceConfig: {"kind": [KINDS]},
    LossConfig: {"name": [LOSSES]},
    OptimizerConfig: {"name": [OPTIMIZERS]},
    GroupConfig: {"optimizer": [("auto",), OPTIMIZERS]},
    ScheduleConfig: {"decay": [DECAY_SHAPES]},
    MetricsConfig: {"loggers": [LOGGERS, PLUGIN_LOGGERS]},
}
"""Keys whose choices are the entries of registries, to which plugins may add."""


class Key(NamedTuple):
    """What a key takes, and what is true of it. type: of its values. default: also the example in remedies; of a
    hyper-parameter, that of the family's first flavor."""

    type: Any
    default: Any
    setting: Setting = Setting()

    @property
    def range(self) -> Range | None:
        return self.setting.range


@cache
def _type_hints(section_type: type) -> Mapping[str, Any]:
    return get_type_hints(section_type)


def columns_of(section_type: type) -> dict[str, Key]:
    """Field -> what it takes, of the dataclass of a section, of a table or of hyper-parameters."""
    hints = dict(_type_hints(section_type))
    for name, tables in TABLES.get(section_type, {}).items():
        choice: Any = Literal[tuple(chain(*tables))]
        hints[name] = tuple[choice, ...] if get_origin(hints[name]) is tuple else choice
    settings = settings_of(section_type)
    return {
        field.name: Key(
            hints[field.name], None if field.default is dataclasses.MISSING else field.default, settings[field.name]
        )
        for field in dataclasses.fields(section_type)
    }


SECTIONS: Mapping[str, type] = {field.name: field.type for field in dataclasses.fields(JobConfig)}  # type: ignore[misc]


def keys_of(section: str, family: str | None) -> dict[str, Key]:
    """Key -> what it takes, of one section. [model] has the hyper-parameters of `family`, unless it is None."""
    keys = columns_of(SECTIONS[section])
    if section == "model":
        del keys["overrides"]
        keys["family"] = keys["family"]._replace(type=Literal[tuple(FAMILIES)])
        if family is not None:
            flavors = FAMILIES[family].flavors
            keys["flavor"] = keys["flavor"]._replace(type=Literal[tuple(flavors)])
            first = next(iter(flavors.values()))
            keys |= {name: key._replace(default=getattr(first, name)) for name, key in columns_of(type(first)).items()}
    return keys


def keys_that_affect(*affected: Affects) -> set[str]:
    """Full keys by what they affect: one of `affected`. A hyper-parameter, and a key of a table, counts as its section
    or array."""
    return {
        f"{section}.{name}"
        for section in SECTIONS
        for name, key in keys_of(section, None).items()
        if key.setting.affects in affected
    }


def setting_of(full_key: str) -> Setting:
    """What is true of a key, as data.sources.0.path; a hyper-parameter affects what its section affects."""
    section, name, *row = full_key.split(".")
    key = keys_of(section, None).get(name)
    if key is None:
        return Setting(affects="facts")
    table = row_type(key.type)
    return columns_of(table)[row[1]].setting if row and table else key.setting


def row_type(value_type: Any) -> type | None:
    """The dataclass of one table if the key is an array of tables, else None."""
    item = get_args(value_type)[0] if get_origin(value_type) is tuple else None
    return item if isinstance(item, type) and dataclasses.is_dataclass(item) else None


def fields_of(values: Any) -> dict[str, Any]:
    """Field -> value of a dataclass, one level deep."""
    return {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}


def literal(value: Any) -> str:
    """`value` as TOML; reading it back gives an equal value of the same type."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value)  # a subclass, as those of numpy, may have another one
    if isinstance(value, tuple | list):
        return "[" + ", ".join(literal(item) for item in value) + "]"
    raise TypeError(f"{type(value).__name__} is not a type of the configuration: {value!r}")


def is_text(value_type: Any) -> bool:
    """Whether values of this type are strings, written without quotes on the command line."""
    return value_type is str or get_origin(value_type) is Literal


def alternatives(value_type: Any) -> tuple[Any, tuple[str, ...]]:
    """(type, words) of values that are of a type or one of some words, as `int | Literal["auto"]`; else (type, ()).
    A Length is an int here."""
    if get_origin(value_type) not in (Union, UnionType):
        return value_type, ()
    other_type, words = get_args(value_type)
    return other_type, get_args(words)


def value_from_text(text: str, value_type: Any) -> Any:
    """A value from the command line: a string unchanged, any other type parsed as TOML.

    Text that is not valid TOML, or nested too deeply, is returned as a string, which is then refused.
    """
    number_type, words = alternatives(value_type)
    if is_text(number_type) or text in words or text.endswith("\n"):
        return text
    try:
        table = tomli.loads(f"table = {{value = {text}}}")  # inline, so that a comment is an error
        check_depth(table)
    except (ValueError, RecursionError):
        return text
    return table["table"]["value"] if list(table) == ["table"] and list(table["table"]) == ["value"] else text


def describe_type(value_type: Any) -> str:
    """The values of a type, in words."""
    other_type, words = alternatives(value_type)
    if words:
        return f"{describe_type(other_type)} or {' or '.join(map(literal, words))}"
    if get_origin(value_type) is Literal:
        return "one of " + ", ".join(literal(choice) for choice in get_args(value_type))
    if get_origin(value_type) is tuple:
        item = get_args(value_type)[0]
        return (
            "an array of tables" if row_type(value_type) else f"an array of {'strings' if is_text(item) else 'numbers'}"
        )
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    return names[value_type]
