"""Strict reading of all values by pydantic, from whose types the JSON schema is made, too; a Problem for each error."""

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict

from titanlite.checkpoint.dropped import DROPPED
from titanlite.config.fields import SECTIONS, TABLES, columns_of, keys_of
from titanlite.config.files import EXTENDS
from titanlite.config.value_types import Key, close_names, explain, fold, row_type, value_type
from titanlite.models.family import ModelConfig
from titanlite.models.registry import FAMILIES
from titanlite.runtime.errors import Problem

_TypedDict: Any = TypedDict


def read_values(tables: Mapping[str, Any], family: str | None) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """Read the tables of a configuration: (section -> key -> value of the field's type, all problems).

    A key with a problem is left out. tables: by section, as parsed from TOML; not changed. family: of the model; None
    if it is unknown, then the keys of [model] are not read.
    """
    given = deepcopy(dict(tables))
    if family is None and isinstance(given.get("model"), dict):
        given["model"] = {key: value for key, value in given["model"].items() if key == "family"}
    read: dict[str, dict[str, Any]] = {}
    found: dict[str, Problem] = {}
    for section in [name for name in SECTIONS if name in given]:
        adapter = adapter_of(section, family)
        try:
            read[section] = adapter.validate_python(given[section])
        except ValidationError as error:
            for details in error.errors(include_url=False):
                location = (section, *details["loc"])
                problem = _problem(location, details, tables, family)
                found.setdefault(problem.key, problem)
                _remove(given, location)
            if section in given:
                read[section] = adapter.validate_python(given[section])
    unknown = [_unknown_entry(name, value) for name, value in given.items() if name not in SECTIONS]
    return read, [*found.values(), *unknown]


def adapter_of(section: str, family: str | None) -> TypeAdapter[dict[str, Any]]:
    """What reads a section, with the choices that are registered now."""
    if section == "model":
        flavors = (FAMILIES[family].config_type, *FAMILIES[family].flavors) if family else ()
        return _adapter(section, family, (tuple(FAMILIES), flavors))
    choices = tuple(tuple(table) for keys in TABLES.values() for tables in keys.values() for table in tables)
    return _adapter(section, None, choices)


@cache
def _adapter(section: str, family: str | None, _registered: Any) -> TypeAdapter[dict[str, Any]]:
    """Cached by section, since a configuration has some of them, and only [model] depends on the family."""
    return TypeAdapter(table_type(section, keys_of(section, family)))


def table_type(name: str, keys: Mapping[str, Any]) -> Any:
    """The type of a table of TOML, for pydantic. keys: name -> Key, or a type of pydantic."""
    columns = {name: annotated(key) if isinstance(key, Key) else key for name, key in keys.items()}
    return with_config(ConfigDict(extra="forbid"))(_TypedDict(name, columns, total=False))


def annotated(key: Key) -> Any:
    """The type of a key's values, for pydantic: strict, in its range."""
    if row := row_type(key.type):
        build = AfterValidator(lambda values: row(**values))
        return tuple[Annotated[table_type(row.__name__, columns_of(row)), build], ...]  # type: ignore[misc]
    return value_type(key)


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


def _problem(
    location: Sequence[str | int], error: ErrorDetails, tables: Mapping[str, Any], family: str | None
) -> Problem:
    """The problem that an error of pydantic describes. location: of the value, from its section on."""
    value, is_unknown = error["input"], error["type"] == "extra_forbidden"
    section, *path = (str(part) for part in location)
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
    folded = fold(key)
    prefix, _, name = folded.rpartition(".")
    if folded in known:
        return [folded]
    elsewhere = [candidate for candidate in known if candidate.rpartition(".")[2] == name]
    elsewhere = [candidate for candidate in elsewhere if candidate.startswith(f"{prefix}.")] or elsewhere
    siblings = [candidate.rpartition(".")[2] for candidate in known if candidate.rpartition(".")[0] == prefix]
    if siblings:
        return elsewhere or [f"{prefix}.{close}" for close in close_names(name, siblings)]
    return get_close_matches(folded, known, 1, 0.75) or elsewhere
