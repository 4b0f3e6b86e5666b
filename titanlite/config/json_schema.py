"""The JSON schema of a TOML file, from which editors complete and check it: pydantic's, of the types of all keys."""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from titanlite.config.describe import field_texts, section_text
from titanlite.config.fields import SECTIONS, columns_of, keys_of
from titanlite.config.files import EXTENDS
from titanlite.config.value_types import Key, row_type
from titanlite.config.values import annotated, table_type
from titanlite.models.family import ModelConfig
from titanlite.models.registry import FAMILIES

DRAFT = "http://json-schema.org/draft-07/schema#"
"""The newest draft that all TOML extensions of editors support."""

Schema = dict[str, Any]


class _Untitled(GenerateJsonSchema):
    """Without a title for each key, which would repeat its name."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


def json_schema() -> Schema:
    """The schema. It has what a single key needs; rules across keys are left to `--check`."""
    sections = {name: _section(name) for name in SECTIONS}
    extends = Annotated[
        str | list[str],
        Field(
            description="TOML files that this one extends, relative to it, or names of shipped configurations. "
            "Later ones override earlier ones, and this file overrides all."
        ),
    ]
    root = table_type("titanlite", {EXTENDS: extends, **sections})
    schema = TypeAdapter(root).json_schema(schema_generator=_Untitled)
    schema["$defs"]["model"]["allOf"] = _rules_of_families()
    return {"$schema": DRAFT, **schema, "title": "titanlite", "description": "A training run of titanlite."}


def _section(name: str) -> Any:
    if name == "model":
        return _described(table_type(name, _model()), section_text(ModelConfig))
    return _described(table_type(name, _keys(SECTIONS[name], keys_of(name, None))), section_text(SECTIONS[name]))


def _described(kind: Any, text: str, **more: Any) -> Any:
    return Annotated[kind, Field(description=text, json_schema_extra=more)]


def _keys(section_type: type, kinds: Mapping[str, Key]) -> dict[str, Any]:
    """Key -> its type, with its text and its default."""
    texts, keys = field_texts(section_type), {}
    for key, kind in kinds.items():
        row = row_type(kind.type)
        default = {} if row or kind.default is None else {"default": _plain(kind.default)}
        keys[key] = _described(tuple[_row(row), ...] if row else annotated(kind), texts.get(key, ""), **default)  # type: ignore[misc]
    return keys


@cache  # one type for all arrays of it
def _row(row: type) -> Any:
    return _described(table_type(row.__name__, _keys(row, columns_of(row))), section_text(row))


def _model() -> dict[str, Any]:
    """The keys of [model] with the hyper-parameters of all families, whose texts may differ."""
    own = keys_of("model", None)
    keys = _keys(ModelConfig, own | {"flavor": own["flavor"]._replace(type=str)})
    texts: dict[str, str] = {}
    for family in FAMILIES.values():
        for key, text in field_texts(family.config_type).items():
            if texts.setdefault(key, text) != text:
                texts[key] += f" {family.name}: {text}"
    kinds = {key: kind for family in FAMILIES.values() for key, kind in columns_of(family.config_type).items()}
    return keys | {key: _described(annotated(kind), texts[key]) for key, kind in kinds.items()}


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _rules_of_families() -> list[Schema]:
    """For each family, if the file names it, its flavors and the keys that it has.

    A file that extends another one may have hyper-parameters only.
    """
    rules = []
    for family in FAMILIES.values():
        names = {"enum": list(keys_of("model", family.name))}
        then = {"properties": {"flavor": {"enum": list(family.flavors)}}, "propertyNames": names}
        rules.append({"if": {"properties": {"family": {"const": family.name}}, "required": ["family"]}, "then": then})
    return rules
