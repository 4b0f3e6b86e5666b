"""Types of keys, strict reading of values from TOML and command line, and their TOML form."""

import dataclasses
import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from itertools import chain
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from titanlite.config.schema import JobConfig
from titanlite.data.kinds import KINDS
from titanlite.data.sources.config import SourceConfig
from titanlite.metrics.config import MetricsConfig
from titanlite.metrics.sinks import OWN_LOGGERS, SERVICES
from titanlite.models.family import ModelConfig
from titanlite.models.head import LossConfig
from titanlite.models.losses import LOSSES
from titanlite.models.registry import FAMILIES
from titanlite.optim.optimizer import GroupConfig, OptimizerConfig
from titanlite.optim.registry import OPTIMIZERS
from titanlite.optim.schedule import DECAY_SHAPES, Length, ScheduleConfig
from titanlite.runtime.errors import Problem
from titanlite.runtime.json_files import check_depth

INT64 = range(-(2**63), 2**63)

TABLES: Mapping[type, Mapping[str, Sequence[Iterable[str]]]] = {
    SourceConfig: {"kind": [KINDS]},
    LossConfig: {"name": [LOSSES]},
    OptimizerConfig: {"name": [OPTIMIZERS]},
    GroupConfig: {"optimizer": [("auto",), OPTIMIZERS]},
    ScheduleConfig: {"decay": [DECAY_SHAPES]},
    MetricsConfig: {"loggers": [OWN_LOGGERS, SERVICES]},
}
"""Keys whose choices are the entries of registries, to which plugins may add."""


@cache
def _type_hints(section_type: Any) -> Mapping[str, Any]:
    return get_type_hints(section_type)


def types_of(section_type: Any) -> dict[str, Any]:
    """Field -> type of its values, of a dataclass."""
    hints = dict(_type_hints(section_type))
    for name, tables in TABLES.get(section_type, {}).items():
        choice: Any = Literal[tuple(chain(*tables))]
        hints[name] = tuple[choice, ...] if get_origin(hints[name]) is tuple else choice
    return {field.name: hints[field.name] for field in dataclasses.fields(section_type)}


SECTIONS: Mapping[str, type] = types_of(JobConfig)


def section_types(section: str, family: str | None) -> dict[str, Any]:
    """Key -> type of its values, for one section. [model] has the hyper-parameters of `family`, unless it is None."""
    types = types_of(SECTIONS[section])
    if SECTIONS[section] is ModelConfig:
        del types["overrides"]
        types["family"] = Literal[tuple(FAMILIES)]
        if family is not None:
            types["flavor"] = Literal[tuple(FAMILIES[family].flavors)]
            types |= types_of(FAMILIES[family].config_type)
    return types


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

    Text that is not valid TOML, or nested too deeply, is returned as a string, which `read_value` then refuses.
    """
    number_type, words = alternatives(value_type)
    if is_text(number_type) or text in words:
        return text
    try:
        table = tomllib.loads(f"table = {{value = {text}}}")  # inline, so that a comment or a second line is an error
        check_depth(table)
    except (ValueError, RecursionError):
        return text
    return table["table"]["value"] if list(table) == ["table"] and list(table["table"]) == ["value"] else text


def read_value(key: str, value: Any, value_type: Any, default: Any) -> Any | Problem:
    """Convert `value` to a field of type `value_type`, or return its Problem, with `default` as an example."""
    if value_type == Length:
        return value if isinstance(value, str) and _is_clean(value) else read_value(key, value, int, default)
    other_type, words = alternatives(value_type)
    if words:
        if value in words:
            return value
        found = read_value(key, value, other_type, default)
        if isinstance(found, Problem):
            return Problem(key, value, describe_type(value_type), f"write {literal(default)}, or {found.rule}")
        return found
    if get_origin(value_type) is Literal:
        return _read_choice(key, value, get_args(value_type))
    if get_origin(value_type) is tuple:
        return _read_array(key, value, get_args(value_type)[0], default)
    if value_type is bool and isinstance(value, bool):
        return value
    if value_type is str and isinstance(value, str):
        return value if _is_clean(value) else _unclean(key, value)
    if value_type in (int, float) and isinstance(value, int) and not isinstance(value, bool):
        return (
            value_type(value)
            if value in INT64
            else Problem(key, value, "from -2^63 to 2^63 - 1", "write a number in this range")
        )
    if value_type is float and isinstance(value, float):
        if math.isfinite(value):
            return value
        return Problem(key, value, "a finite number", f"write a finite number, for example {literal(default)}")
    if value_type not in (bool, int, float, str):
        raise TypeError(f"{key}: the configuration has no values of type {value_type}")
    return Problem(
        key,
        value,
        describe_type(value_type),
        _guess(value, value_type) or f"write {describe_type(value_type)}, for example {literal(default)}",
    )


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


def _read_choice(key: str, value: Any, choices: tuple[str, ...]) -> Any | Problem:
    if isinstance(value, str) and value in choices:
        return value
    folded = {choice.lower(): choice for choice in choices if choice}
    close = get_close_matches(str(value).lower(), folded, 1)
    remedy = f"did you mean {literal(folded[close[0]])}?" if close else "use one of these values"
    return Problem(key, value, describe_type(Literal[choices]), remedy)


def _read_array(key: str, value: Any, value_type: Any, default: Any) -> Any | Problem:
    if not isinstance(value, list):
        example = literal([value]) if isinstance(value, str) else literal(default)
        return Problem(key, value, f"an array, each item {describe_type(value_type)}", f"write {example}")
    items = [read_value(key, item, value_type, "text" if is_text(value_type) else 1.0) for item in value]
    bad = [item for item in items if isinstance(item, Problem)]
    return bad[0] if bad else tuple(items)


def _is_clean(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def _unclean(key: str, value: str) -> Problem:
    return Problem(key, value, "valid Unicode text without NUL characters", "remove these characters")


def _guess(value: Any, value_type: type) -> str:
    """The remedy if the intended value can be guessed, else ""."""
    if value_type is str:
        return f"write {literal(str(value))}" if isinstance(value, int | float) else ""
    meant: Any = value.strip() if isinstance(value, str) else value
    if value_type is bool:
        words = {
            "true": True,
            "yes": True,
            "on": True,
            "1": True,
            "false": False,
            "no": False,
            "off": False,
            "0": False,
        }
        return f"write {literal(words[str(meant).lower()])}" if str(meant).lower() in words else ""
    if isinstance(meant, str | float):
        try:
            number = float(meant)
        except ValueError:
            return ""
        if math.isfinite(number) and (value_type is float or number.is_integer()):
            return f"write {literal(value_type(number))}" + (" without quotes" if isinstance(value, str) else "")
    return ""
