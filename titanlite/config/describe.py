"""Describe every key, from the source of the sections, for the help and docs/config.md."""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

from titanlite.config.fields import SECTIONS, columns_of, fields_of, keys_of
from titanlite.config.schema import JobConfig
from titanlite.config.value_types import Key, alternatives, literal, row_type
from titanlite.models.family import ModelConfig
from titanlite.optim.lengths import Length


@dataclass(frozen=True)
class Line:
    """A key. name: without its section. label: of the type of its values. value: as TOML. text: its meaning."""

    name: str
    label: str
    value: str
    text: str


@dataclass(frozen=True)
class Section:
    """A section, or one table of an array ("data.sources.0"), with its keys in the order of the dataclass."""

    name: str
    text: str
    keys: tuple[Line, ...]


def describe_config(config: JobConfig) -> list[Section]:
    """All sections, with the values of `config`. [model] has the hyper-parameters of its family and flavor."""
    sections = []
    for name, section_type in SECTIONS.items():
        values, texts = fields_of(getattr(config, name)), field_texts(section_type)
        if section_type is ModelConfig:
            family, hyper_parameters = config.family, config.hyper_parameters
            values |= fields_of(hyper_parameters)
            texts = {**texts, **field_texts(family.config_type)}
        keys = keys_of(name, config.model.family)
        arrays = {key: row for key in keys if (row := row_type(keys[key].type))}
        plain = {key: keys[key] for key in keys if key not in arrays}
        sections.append(Section(name, section_text(section_type), _described(values, plain, texts)))
        for key, row_class in arrays.items():
            texts = field_texts(row_class)
            for index, row in enumerate(values[key] or (row_class(),)):  # an empty array: show defaults
                columns = _described(fields_of(row), columns_of(row_class), texts)
                sections.append(Section(f"{name}.{key}.{index}", section_text(row_class), columns))
    return sections


@cache  # reads the source file
def field_texts(section_type: type) -> Mapping[str, str]:
    """Field -> the string below it in the source, as one line; also of fields that are inherited."""
    texts: dict[str, str] = {}
    for base in (base for base in reversed(section_type.__bases__) if is_dataclass(base)):
        texts |= field_texts(base)
    tree = ast.parse(textwrap.dedent(inspect.getsource(section_type))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            texts[field.target.id] = " ".join(below.value.value.split())
    return texts


def type_label(value_type: Any) -> str:
    """The values of a type: "INT", "{true,false}", "{AdamW,SGD}", "[STR, ...]", "{INT,auto}"."""
    other_type, words = alternatives(value_type)
    if words:
        return "{" + ",".join([type_label(other_type).strip("{}"), *words]) + "}"
    if get_origin(value_type) is Literal:
        return "{" + ",".join(choice or '""' for choice in get_args(value_type)) + "}"
    if get_origin(value_type) is tuple:
        return f"[{type_label(get_args(value_type)[0])}, ...]"
    if get_origin(value_type) is dict:
        return f"{{NAME = {type_label(get_args(value_type)[1])}, ...}}"
    return {bool: "{true,false}", int: "INT", float: "FLOAT", str: "STR", Length: "{INT,STR}"}[value_type]


def _described(values: Mapping[str, Any], keys: Mapping[str, Key], texts: Mapping[str, str]) -> tuple[Line, ...]:
    return tuple(
        Line(name, type_label(key.type), literal(values[name]), texts.get(name, "")) for name, key in keys.items()
    )


def section_text(section_type: type) -> str:
    """The docstring of a section, as one line."""
    return " ".join((section_type.__doc__ or "").split())
