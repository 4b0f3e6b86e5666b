"""Strict reading of all values by pydantic, from whose types the JSON schema is made, too; a Problem for each error."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    with_config,
)
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict

from titanlite.checkpoint.dropped import DROPPED
from titanlite.config.fields import (
    SECTIONS,
    TABLES,
    Key,
    alternatives,
    columns_of,
    describe_type,
    is_text,
    keys_of,
    literal,
    row_type,
)
from titanlite.config.files import EXTENDS
from titanlite.models.family import ModelConfig
from titanlite.models.registry import FAMILIES
from titanlite.optim.schedule import LENGTH_PATTERN, LENGTH_RULE, Length, steps_of
from titanlite.runtime.errors import Problem
from titanlite.runtime.settings import Range

INT64 = range(-(2**63), 2**63)
_TypedDict: Any = TypedDict

WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
"""Texts that people write for a boolean."""


def read_values(tables: Mapping[str, Any], family: str | None) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """Read the tables of a configuration: (section -> key -> value of the field's type, all problems).

    A key with a problem is left out. tables: by section, as parsed from TOML; not changed. family: of the model; None
    if it is unknown, then the keys of [model] are not read.
    """
    given = deepcopy(dict(tables))
    if family is None and isinstance(given.get("model"), dict):
        given["model"] = {key: value for key, value in given["model"].items() if key == "family"}
    adapter = adapter_of(family)
    try:
        return adapter.validate_python(given), []
    except ValidationError as error:
        found: dict[str, Problem] = {}
        for details in error.errors(include_url=False):
            problem = _problem(details, tables, family)
            found.setdefault(problem.key, problem)
            _remove(given, details["loc"])
    return adapter.validate_python(given), list(found.values())


def adapter_of(family: str | None) -> TypeAdapter[dict[str, dict[str, Any]]]:
    """What reads all sections, with the choices that are registered now."""
    flavors = (FAMILIES[family].config_type, *FAMILIES[family].flavors) if family else ()
    choices = tuple(tuple(table) for keys in TABLES.values() for tables in keys.values() for table in tables)
    return _adapter(family, (tuple(FAMILIES), flavors, choices))


@cache
def _adapter(family: str | None, _registered: Any) -> TypeAdapter[dict[str, dict[str, Any]]]:
    sections = {name: table_type(name, keys_of(name, family)) for name in SECTIONS}
    return TypeAdapter(table_type("job", sections))


def table_type(name: str, keys: Mapping[str, Any]) -> Any:
    """The type of a table of TOML, for pydantic. keys: name -> Key, or a type of pydantic."""
    columns = {name: annotated(key) if isinstance(key, Key) else key for name, key in keys.items()}
    return with_config(ConfigDict(extra="forbid"))(_TypedDict(name, columns, total=False))


def annotated(key: Key) -> Any:
    """The type of a key's values, for pydantic: strict, in its range."""
    if key.type == Length:
        rule = key.range or Range("")
        text: Any = Annotated[
            str, Strict(), Field(pattern=LENGTH_PATTERN), AfterValidator(lambda text: _length(text, rule))
        ]
        return _number(int, rule) | text
    other, words = alternatives(key.type)
    if words:
        return annotated(key._replace(type=other)) | Literal[words]
    if get_origin(key.type) is Literal:
        return key.type
    if row := row_type(key.type):
        build = AfterValidator(lambda values: row(**values))
        return tuple[Annotated[table_type(row.__name__, columns_of(row)), build], ...]  # type: ignore[misc]
    if get_origin(key.type) is tuple:
        return tuple[annotated(Key(get_args(key.type)[0], None)), ...]  # type: ignore[misc]
    if key.type is bool:
        return Annotated[bool, Strict()]
    if key.type is str:
        return Annotated[str, Strict(), AfterValidator(_clean)]
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
    if not rule.has(steps_of(text, 1, 10**9)):
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


def _remove(tables: dict[str, Any], location: Sequence[str | int]) -> None:
    """Remove a value with a problem: a key, a key of a table in an array, or an entry that is no section."""
    section, *path = location
    is_in_row = len(path) > 2 and isinstance(_at(tables, location[:3]), dict)
    *above, last = [section, *path[: 3 if is_in_row else 1]]
    table = _at(tables, above)
    if isinstance(table, dict):
        table.pop(last, None)


def _at(tables: Any, location: Sequence[str | int]) -> Any:
    """The value at a location; None if there is none."""
    for name in location:
        try:
            tables = tables[name]
        except (KeyError, IndexError, TypeError):
            return None
    return tables


def _problem(error: ErrorDetails, tables: Mapping[str, Any], family: str | None) -> Problem:
    """The problem that an error of pydantic describes."""
    location, value, is_unknown = error["loc"], error["input"], error["type"] == "extra_forbidden"
    section, *path = (str(part) for part in location)
    if not path and is_unknown:
        return _unknown_entry(section, value)
    if not path:
        return Problem(section, value, "a table of keys", f"write [{section}] and its keys below it")
    key = f"{section}.{path[0]}"
    if len(path) == 1 and is_unknown:
        return unknown_key(key, value, family)
    taken = keys_of(section, family)[path[0]]
    if row := row_type(taken.type):
        if len(path) < 3:
            given = _at(tables, location[:2])
            return Problem(key, given, "an array of tables", f"write [[{key}]] and its keys below it")
        key = ".".join([section, *path[:3]])
        if is_unknown:
            return unknown_column(key, value, row)
        taken = columns_of(row)[path[2]]
    return explain(key, value, taken, error["type"])


def _unknown_entry(name: str, value: Any) -> Problem:
    if not isinstance(value, dict):
        return unknown_key(name, value, ModelConfig.family)
    close = close_names(name, SECTIONS)
    remedy = f"did you mean [{close[0]}]?" if close else "the sections: " + ", ".join(SECTIONS)
    return Problem(name, value, "a section of the configuration", remedy)


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
        return explain(name, value, Key(item, "text" if is_text(item) else 1.0), fault)
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
    text = str(value).strip()
    if value_type is bool:
        return f"write {literal(WORDS[text.lower()])}" if text.lower() in WORDS else ""
    try:
        number = float(text) if isinstance(value, str | float) else math.nan
    except ValueError:
        return ""
    if not math.isfinite(number) or (value_type is int and not number.is_integer()):
        return ""
    return f"write {literal(value_type(number))}" + (" without quotes" if isinstance(value, str) else "")


def full_keys(family: str | None) -> list[str]:
    """All keys in the spelling of the command line, with index 0 for arrays of tables (data.sources.0.path).

    family: of the model; None leaves the hyper-parameters out.
    """
    keys = []
    for section in SECTIONS:
        for name, key in keys_of(section, family).items():
            row = row_type(key.type)
            keys += [f"{section}.{name}.0.{column}" for column in columns_of(row)] if row else [f"{section}.{name}"]
    return keys


def unknown_key(key: str, value: Any, family: str | None) -> Problem:
    """The Problem of a key that does not exist."""
    section, _, name = key.partition(".")
    if EXTENDS in (key, name):
        remedy = f'write {EXTENDS} = "base.toml" above the first [section] of the TOML file'
        return Problem(key, value, "a key at the top of a TOML file", remedy)
    others = [other for other in FAMILIES if name in keys_of("model", other)]
    if section == "model" and others:
        rule = f"a key of [model] with family = {family!r}; {name} is a hyper-parameter of {', '.join(others)}"
        return Problem(key, value, rule, "leave it out, or choose another model.family")
    meant = [] if key in DROPPED else suggest(key, full_keys(family))
    if name and section in SECTIONS:
        rule = f"a key of [{section}]"
        valid = "use one of its keys: " + ", ".join(keys_of(section, family))
    else:
        rule, valid = "a key of a section", "use a key of one of the sections: " + ", ".join(SECTIONS)
    valid = DROPPED[key].remedy if key in DROPPED else valid
    return Problem(key, value, rule, f"did you mean {' or '.join(meant)}?" if meant else valid)


def unknown_column(key: str, value: Any, row: type) -> Problem:
    """The Problem of a key that no table of the array has."""
    table, _, name = key.rpartition(".")
    close = close_names(name, columns_of(row))
    array = table.rpartition(".")[0]
    dropped = DROPPED.get(f"{array}.{name}")
    remedy = f"did you mean {table}.{close[0]}?" if close else "its keys: " + ", ".join(columns_of(row))
    remedy = dropped.remedy if dropped else remedy
    return Problem(key, value, f"a key of one [[{array}]] table", remedy)


def suggest(key: str, known: Collection[str]) -> list[str]:
    """The known keys most similar to `key`: usually one or none, several if equally likely."""
    folded = _fold(key)
    prefix, _, name = folded.rpartition(".")
    if folded in known:
        return [folded]
    elsewhere = [candidate for candidate in known if candidate.rpartition(".")[2] == name]
    elsewhere = [candidate for candidate in elsewhere if candidate.startswith(f"{prefix}.")] or elsewhere
    siblings = [candidate.rpartition(".")[2] for candidate in known if candidate.rpartition(".")[0] == prefix]
    if siblings:
        return elsewhere or [f"{prefix}.{close}" for close in close_names(name, siblings)]
    return get_close_matches(folded, known, 1, 0.75) or elsewhere


def close_names(name: str, known: Collection[str]) -> list[str]:
    """The known name most similar to `name`, if any, ignoring case and hyphens."""
    folded = {_fold(candidate): candidate for candidate in known}
    return [folded[match] for match in get_close_matches(_fold(name), folded, 1)]


def _fold(name: str) -> str:
    return name.lower().replace("-", "_")
