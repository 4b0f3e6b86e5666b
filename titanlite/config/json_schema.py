"""The JSON schema of a TOML file, from which editors complete and check it."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal, get_args, get_origin

from titanlite.config.describe import field_texts
from titanlite.config.fields import INT64, SECTIONS, alternatives, fields_of, row_type, section_types, types_of
from titanlite.config.files import EXTENDS
from titanlite.config.schema import JobConfig
from titanlite.models.family import Family, ModelConfig
from titanlite.models.registry import FAMILIES
from titanlite.optim.schedule import LENGTH_PATTERN, Length
from titanlite.runtime.errors import Range

DRAFT = "http://json-schema.org/draft-07/schema#"
"""The newest draft that all TOML extensions of editors support."""

Schema = dict[str, Any]


def json_schema() -> Schema:
    """The schema. It has what a single key needs; rules across keys are left to `--check`."""
    defaults = JobConfig()
    sections = {name: _section(name, getattr(defaults, name)) for name in SECTIONS}
    extends = {
        "description": "TOML files that this one extends, relative to it, or names of shipped configurations. "
        "Later ones override earlier ones, and this file overrides all.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    return {
        "$schema": DRAFT,
        "title": "titanlite",
        "description": "A training run of titanlite.",
        **_table({EXTENDS: extends, **sections}),
    }


def _table(properties: Mapping[str, Schema], text: str = "") -> Schema:
    described = {"description": text} if text else {}
    return {**described, "type": "object", "properties": dict(properties), "additionalProperties": False}


def _section(name: str, default: Any) -> Schema:
    if isinstance(default, ModelConfig):
        return _model(default)
    return _table(_keys(type(default), section_types(name, None), fields_of(default)), _text(type(default)))


def _keys(section: type, types: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Schema]:
    """The schema of each key. defaults: of the keys that have one."""
    texts = field_texts(section)
    ranges = {field.name: field.metadata.get("range") for field in fields(section)}
    found = {}
    for key, kind in types.items():
        text = {"description": texts[key]} if key in texts else {}
        row = row_type(kind)
        if row:
            items = _table(_keys(row, types_of(row), fields_of(row())), _text(row))
            found[key] = {**text, "type": "array", "items": items}
            continue
        default = {"default": _plain(defaults[key])} if key in defaults else {}
        found[key] = {**text, **_values(kind, ranges[key]), **default}
    return found


def _values(kind: Any, rule: Range | None) -> Schema:
    """The values of a type in a range."""
    if kind == Length:
        return {"anyOf": [_values(int, rule), {"type": "string", "pattern": LENGTH_PATTERN}]}
    other, words = alternatives(kind)
    if words:
        return {"anyOf": [_values(other, rule), {"enum": list(words)}]}
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if get_origin(kind) is tuple:
        return {"type": "array", "items": _values(get_args(kind)[0], None)}
    schema: Schema = {"type": {bool: "boolean", int: "integer", float: "number", str: "string"}[kind]}
    bounds: Schema = {"minimum": INT64.start, "maximum": INT64.stop - 1} if kind is int else {}
    if rule is not None:
        given = {
            "minimum": rule.least,
            "exclusiveMinimum": rule.above,
            "maximum": rule.most,
            "exclusiveMaximum": rule.below if rule.below != float("inf") else None,
        }
        given = {word: bound for word, bound in given.items() if bound is not None}
        if isinstance(rule.unset, int | float) and not replace(rule, unset=None).has(rule.unset):
            return schema | {"anyOf": [{"const": rule.unset}, given]}
        bounds |= given
    return schema | bounds


def _model(default: ModelConfig) -> Schema:
    """[model]: the hyper-parameters of all families, and for each family those that it has, if the file names it.

    A file that extends another one may have hyper-parameters only.
    """
    texts = field_texts(ModelConfig)
    keys: dict[str, Schema] = {
        "family": {"description": texts["family"], "enum": list(FAMILIES), "default": default.family},
        "flavor": {"description": texts["flavor"], "type": "string", "default": default.flavor},
    }
    for family in FAMILIES.values():
        for key, schema in _hyper_parameters(family).items():
            first = keys.setdefault(key, schema)
            if first["description"] != schema["description"]:
                first["description"] = f"{first['description']} {family.name}: {schema['description']}"
    rules = []
    for family in FAMILIES.values():
        names = {"enum": ["family", "flavor", *types_of(family.config_type)]}
        then = {"properties": {"flavor": {"enum": list(family.flavors)}}, "propertyNames": names}
        rules.append({"if": {"properties": {"family": {"const": family.name}}, "required": ["family"]}, "then": then})
    return _table(keys, _text(ModelConfig)) | {"allOf": rules}


def _hyper_parameters(family: Family) -> dict[str, Schema]:
    keys = _keys(family.config_type, types_of(family.config_type), {})
    return {key: {"description": "", **schema} for key, schema in keys.items()}


def _text(section: type) -> str:
    return " ".join((section.__doc__ or "").split())


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
