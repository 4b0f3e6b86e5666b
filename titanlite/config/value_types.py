"""Values of keys and of options: their types, texts and ranges, and the problem of a value that a key does not take."""

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import is_dataclass, replace
from difflib import get_close_matches
from pathlib import PurePath
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import numpy as np
import tomli
from pydantic import AfterValidator, BeforeValidator, Field, Strict, WithJsonSchema

from titanlite.optim.lengths import LENGTH_PATTERN, LENGTH_RULE, Length, steps_of
from titanlite.runtime.environment import expand_home
from titanlite.runtime.errors import Problem, UserError
from titanlite.runtime.json_files import check_depth
from titanlite.runtime.settings import Range, Setting
from titanlite.runtime.text import ascii_form


class Key(NamedTuple):
    """What a key takes, and what is true of it. type: of its values. default: also the example in remedies; of a
    hyper-parameter, that of the family's first flavor."""

    type: Any
    default: Any
    setting: Setting = Setting()

    @property
    def range(self) -> Range | None:
        return self.setting.range


INT64 = range(-(2**63), 2**63)


WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
"""Texts that people write for a boolean."""


def row_type(value_type: Any) -> type | None:
    """The dataclass of one table if the key is an array of tables, else None."""
    item = get_args(value_type)[0] if get_origin(value_type) is tuple else None
    return item if isinstance(item, type) and is_dataclass(item) else None


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
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(name)} = {literal(item)}" for name, item in value.items()) + "}"
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
    if get_origin(value_type) is dict:
        return "a table of numbers by name"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    return names[value_type]


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


def plain(value: Any) -> Any:
    """The value as TOML has it: paths as strings, tuples as lists, numbers of numpy as those of Python."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def text_of(value: Any) -> str | None:
    """A Python value as it is written on the command line; None for a value that no key has."""
    value = plain(value)
    try:
        return value if isinstance(value, str) else literal(value)
    except TypeError:
        return None


def value_type(key: Key) -> Any:
    """The type of a key's values, for pydantic: strict, in its range. Of an array of tables: see `annotated`."""
    if key.type == Length:
        rule = key.range or Range("")
        text: Any = Annotated[
            str, Strict(), Field(pattern=LENGTH_PATTERN), AfterValidator(lambda text: _length(text, rule))
        ]
        return _number(int, rule) | text
    other, words = alternatives(key.type)
    if words:
        return value_type(key._replace(type=other)) | Literal[words]
    if get_origin(key.type) is Literal:
        return key.type
    if get_origin(key.type) is tuple:
        return tuple[value_type(key._replace(type=get_args(key.type)[0])), ...]  # type: ignore[misc]
    if get_origin(key.type) is dict:
        return dict[str, value_type(key._replace(type=get_args(key.type)[1]))]  # type: ignore[misc]
    if key.type is bool:
        return Annotated[bool, Strict()]
    if key.type is str:
        text = Annotated[str, Strict(), AfterValidator(_clean)]
        return Annotated[text, AfterValidator(_expanded)] if key.setting.is_path else text
    assert key.type in (int, float), f"the configuration has no values of type {key.type}"
    return _number(key.type, key.range or Range(""))


def _number(kind: type, rule: Range) -> Any:
    bounds: dict[str, Any] = {"ge": rule.least, "gt": rule.above, "le": rule.most}
    bounds |= {"allow_inf_nan": False} if kind is float else {}
    if kind is int:
        bounds |= {"ge": INT64.start if rule.least is None else rule.least, "le": rule.most or INT64.stop - 1}
    bounds["lt"] = None if rule.below == math.inf else rule.below
    number: Any = Annotated[kind, Strict(), Field(**bounds), BeforeValidator(_sized)]
    if not isinstance(rule.unset, int | float) or replace(rule, unset=None).has(rule.unset):
        return number
    value, name = kind(rule.unset), "integer" if kind is int else "number"
    # no Literal: that of 0.0 takes false
    exact = WithJsonSchema({"const": value, "type": name})
    return Annotated[kind, Strict(), Field(ge=value, le=value), exact] | number


def _length(text: str, rule: Range) -> str:
    if not rule.has(steps_of(text, int, 10**9)):
        raise ValueError
    return text


def _sized(value: Any) -> Any:
    if isinstance(value, int) and value not in INT64:
        raise ValueError
    return value


def _clean(text: str) -> str:
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError
    return text


def _expanded(path: str) -> str:
    try:
        return expand_home(path)
    except UserError:
        raise ValueError from None


def explain(name: str, value: Any, key: Key, fault: str) -> Problem:
    """The problem of a value that a key does not take. name: the full key. fault: the type of pydantic's error."""
    number, words = alternatives(key.type)
    if key.type == Length and isinstance(value, str) and re.fullmatch(LENGTH_PATTERN, value) and key.range:
        return Problem(name, value, str(key.range), key.range.remedy)
    if key.type == Length and (not isinstance(value, int) or isinstance(value, bool)):
        return Problem(name, value, LENGTH_RULE, 'write for example 100, "2_000_000 tokens" or "5 %"')
    if get_origin(key.type) is tuple and fault == "tuple_type":
        item, example = get_args(key.type)[0], [value] if isinstance(value, str) else key.default
        return Problem(name, value, f"an array, each item {describe_type(item)}", f"write {literal(example)}")
    if get_origin(key.type) is tuple:
        item = get_args(key.type)[0]
        return explain(name, value, key._replace(type=item, default="text" if is_text(item) else 1.0), fault)
    if get_origin(key.type) is dict and fault == "dict_type":
        return Problem(name, value, describe_type(key.type), "write { NAME = 0.5, OTHER = 0.5 }")
    if get_origin(key.type) is dict:
        return explain(name, value, key._replace(type=get_args(key.type)[1], default=1.0), fault)
    if get_origin(key.type) is Literal:
        return not_a_choice(name, value, get_args(key.type))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and isinstance(value, float) and not math.isfinite(value):
        return Problem(name, value, "a finite number", f"write a finite number, for example {literal(key.default)}")
    if is_number and isinstance(value, int) and value not in INT64:
        return Problem(name, value, "from -2^63 to 2^63 - 1", "write a number in this range")
    if is_number and key.range and (isinstance(value, int) or number is float):
        return Problem(name, value, str(key.range), key.range.remedy)
    rule, example = describe_type(key.type), f"for example {literal(key.default)}"
    if fault == "value_error" and key.setting.is_path and str(value).removeprefix("hf:").startswith("~"):
        return Problem(name, value, "a path; ~ is a home folder, and this one is unknown", "write the path without ~")
    if fault == "value_error" and key.setting.is_path and "$" in str(value):
        return Problem(name, value, "a path; environment variables in it are not replaced", "write their values")
    if fault == "value_error":
        return Problem(name, value, "valid Unicode text without NUL characters", "remove these characters")
    if words:
        return Problem(name, value, rule, f"write {literal(key.default)}, or {describe_type(number)}")
    return Problem(name, value, rule, _guess(value, key.type) or f"write {rule}, {example}")


def not_a_choice(key: str, value: Any, choices: tuple[str, ...]) -> Problem:
    folded = {choice.lower(): choice for choice in choices if choice}
    close = get_close_matches(str(value).lower(), folded, 1)
    remedy = f"did you mean {literal(folded[close[0]])}?" if close else "use one of these values"
    return Problem(key, value, describe_type(Literal[choices]), remedy)


def _guess(value: Any, value_type: type) -> str:
    """The remedy if the intended value can be guessed, else ""."""
    if value_type is str:
        return f"write {literal(str(value))}" if isinstance(value, int | float) else ""
    text = "".join(map(ascii_form, str(value))).strip().strip("\"'")
    if value_type is bool:
        return f"write {literal(WORDS[text.lower()])}" if text.lower() in WORDS else ""
    try:
        number = float(text) if isinstance(value, str | float) else math.nan
    except ValueError:
        return ""
    if not math.isfinite(number) or (value_type is int and not number.is_integer()):
        return ""
    return f"write {literal(value_type(number))}" + (" without quotes" if isinstance(value, str) else "")


def missing_value(key: str, default: Any) -> Problem:
    """The Problem of a known key, or of an option with its hyphens, without a value. default: the example."""
    flag = key if key.startswith("--") else f"--{key}"
    if isinstance(default, str):
        remedy = f"write {flag} {default or 'TEXT'}; for a value that starts with --, write {flag}=--VALUE"
    else:
        remedy = f"write {flag} {literal(default)}"
    return Problem(key, None, "needs a value", remedy)


def close_names(name: str, known: Collection[str]) -> list[str]:
    """The known name most similar to `name`, if any, ignoring case and hyphens."""
    folded = {fold(candidate): candidate for candidate in known}
    return [folded[match] for match in get_close_matches(fold(name), folded, 1)]


def fold(name: str) -> str:
    return name.lower().replace("-", "_")
