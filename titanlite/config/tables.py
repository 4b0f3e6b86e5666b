"""Tables as TOML has them, with the command line's values put in, turned into sections: names and types only."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from titanlite.config.arguments import missing_value
from titanlite.config.names import SECTIONS, close_names, kinds_of, row_type, section_kinds, unknown_key
from titanlite.config.values import read_value, value_from_text
from titanlite.models.family import ModelConfig
from titanlite.models.registry import FAMILIES
from titanlite.runtime.errors import Problem

Tables = dict[str, dict[str, Any]]
"""Section -> key -> value as written; sections are known and are tables, nothing else is checked."""


def fields_of(values: Any) -> dict[str, Any]:
    """Field -> value of a dataclass, one level deep."""
    return {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}


def sections_of(tables: Mapping[str, Any], problems: list[Problem]) -> Tables:
    """The sections among the top-level entries of a file; what else is there goes to `problems`."""
    sections: Tables = {}
    for name, value in tables.items():
        if name in SECTIONS and isinstance(value, dict):
            sections[name] = dict(value)
        elif name in SECTIONS:
            problems.append(
                Problem(name, value, "a section, which is a table", f"write [{name}] and its keys below it")
            )
        elif isinstance(value, dict):
            close = close_names(name, SECTIONS)
            remedy = f"did you mean [{close[0]}]?" if close else "the sections: " + ", ".join(SECTIONS)
            problems.append(Problem(name, value, "a section of the configuration", remedy))
        else:
            problems.append(unknown_key(name, value, ModelConfig.family))
    return sections


def put_argument(tables: Tables, key: str, text: str | None, family: str | None) -> Problem | None:
    """Put the value of one command-line key into `tables`, or say why it has no place there.

    text: None where the key came without a value. family: of the model; None where it is unknown, and so are its keys.
    """
    section, _, name = key.partition(".")
    name, *row_path = name.split(".")
    kind = section_kinds(section, family).get(name) if section in SECTIONS else None
    row = row_type(kind)
    if row and row_path:
        return _put_in_row(tables, key, text, row)
    if kind is None and family is None and section == "model":
        return None
    if kind is None or row_path:
        return unknown_key(key, text or "", family)
    if row:
        return Problem(key, text or "", "set one key at a time on the command line", f"write --{key}.0.KEY VALUE")
    if text is None:
        return missing_value(key, _default(section, name, family))
    tables.setdefault(section, {})[name] = value_from_text(text, kind)
    return None


def build_section(section: str, table: Mapping[str, Any], family: str | None, problems: list[Problem]) -> Any:
    """The section's dataclass; a key with a problem keeps its default."""
    kinds = section_kinds(section, family)
    if section == "model":
        table = {"flavor": ModelConfig.flavor, **table}  # not every family need have a flavor of that name
    values: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{section}.{name}"
        if name not in kinds:
            if section != "model" or family is not None:
                problems.append(unknown_key(key, value, family))
            continue
        row = row_type(kinds[name])
        found: Any
        if row:
            found = _build_rows(key, value, row, problems)
        else:
            found = read_value(key, value, kinds[name], _default(section, name, family))
        if isinstance(found, Problem):
            problems.append(found)
        else:
            values[name] = found
    return _build_model(values, family) if section == "model" else SECTIONS[section](**values)


def _build_model(values: dict[str, Any], family: str | None) -> ModelConfig:
    if family is None:
        return ModelConfig()
    flavor = values.pop("flavor", next(iter(FAMILIES[family].flavors)))
    return ModelConfig(values.pop("family", family), flavor, values)


def _put_in_row(tables: Tables, key: str, text: str | None, row: type) -> Problem | None:
    """Put one value into an array of tables: key is SECTION.NAME.INDEX.COLUMN; INDEX = length appends a table."""
    section, name, index, *columns = key.split(".")
    if not columns:  # the number is missing, or the column
        column = index if index in kinds_of(row) else "KEY"
        number = index if index.isdecimal() else "0"
        remedy = f"write --{section}.{name}.{number}.{column} VALUE"
        return Problem(key, text or "", f"one key of one [[{section}.{name}]] table", remedy)
    if len(columns) != 1 or columns[0] not in kinds_of(row):
        return _unknown_column(key, text or "", row)
    if text is None:
        return missing_value(key, getattr(row, columns[0]))
    rows = tables.setdefault(section, {}).setdefault(name, [fields_of(row) for row in _default(section, name, None)])
    if not isinstance(rows, list) or not all(isinstance(each, dict) for each in rows):
        return None  # what the file has there is a problem of its own
    if not (index.isdecimal() and index.isascii() and str(int(index)) == index and int(index) <= len(rows)):
        last = f"{section}.{name}.{len(rows)}.{columns[0]}"
        return Problem(
            key, text, f"tables count from 0 without gaps, and there are {len(rows)} so far", f"--{last} adds one"
        )
    if int(index) == len(rows):
        rows.append({})
    rows[int(index)][columns[0]] = value_from_text(text, kinds_of(row)[columns[0]])
    return None


def _build_rows(key: str, value: Any, row: type, problems: list[Problem]) -> tuple[Any, ...] | Problem:
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        return Problem(key, value, "an array of tables", f"write [[{key}]] and its keys below it")
    built = []
    for index, table in enumerate(value):
        values = {}
        for name, given in table.items():
            path = f"{key}.{index}.{name}"
            if name not in kinds_of(row):
                problems.append(_unknown_column(path, given, row))
                continue
            found = read_value(path, given, kinds_of(row)[name], getattr(row, name))
            if isinstance(found, Problem):
                problems.append(found)
            else:
                values[name] = found
        built.append(row(**values))
    return tuple(built)


def _unknown_column(key: str, value: Any, row: type) -> Problem:
    table, _, name = key.rpartition(".")
    close = close_names(name, kinds_of(row))
    remedy = f"did you mean {table}.{close[0]}?" if close else "its keys: " + ", ".join(kinds_of(row))
    array = table.rpartition(".")[0]
    return Problem(key, value, f"a key of one [[{array}]] table", remedy)


def _default(section: str, name: str, family: str | None) -> Any:
    """The default of a key; of a hyper-parameter, the first flavor's value."""
    if section == "model" and name not in kinds_of(ModelConfig) and family is not None:
        return getattr(next(iter(FAMILIES[family].flavors.values())), name)
    return getattr(SECTIONS[section](), name)
