"""Types of keys, values as TOML, and values from the text of a command line."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, Literal, get_origin, get_type_hints

from titanlite.config.schema import JobConfig
from titanlite.config.value_types import Key, row_type
from titanlite.data.kinds import KINDS
from titanlite.data.sources.config import SourceConfig
from titanlite.metrics.config import LOGGERS, PLUGIN_LOGGERS, MetricsConfig
from titanlite.models.head import LossConfig
from titanlite.models.losses import LOSSES, TERMS
from titanlite.models.registry import FAMILIES
from titanlite.models.watch import STATISTICS
from titanlite.optim.optimizer import GroupConfig, OptimizerConfig
from titanlite.optim.registry import OPTIMIZERS
from titanlite.optim.schedule import DECAY_SHAPES, ScheduleConfig
from titanlite.runtime.settings import Affects, Setting, settings_of

TABLES: Mapping[type, Mapping[str, Sequence[Iterable[str]]]] = {
    SourceConfig: {"kind": [KINDS]},
    LossConfig: {"name": [LOSSES], "terms": [TERMS]},
    OptimizerConfig: {
        "name": [OPTIMIZERS],
        **{key: [DECAY_SHAPES] for key in ("weight_decay_shape", "momentum_shape")},
    },
    GroupConfig: {"optimizer": [("auto",), OPTIMIZERS]},
    ScheduleConfig: {"decay": [DECAY_SHAPES]},
    MetricsConfig: {"loggers": [LOGGERS, PLUGIN_LOGGERS], "statistics": [STATISTICS]},
}
"""Keys whose choices are the entries of registries, to which plugins may add."""


@cache
def _type_hints(section_type: type) -> Mapping[str, Any]:
    return get_type_hints(section_type)


def columns_of(section_type: type) -> dict[str, Key]:
    """Field -> what it takes, of the dataclass of a section, of a table or of hyper-parameters."""
    hints = dict(_type_hints(section_type))
    for name, tables in TABLES.get(section_type, {}).items():
        names = tuple(chain(*tables))
        choice: Any = Literal[names] if names else str  # a registry of plugins alone may be empty
        hints[name] = tuple[choice, ...] if get_origin(hints[name]) is tuple else choice
    settings = settings_of(section_type)
    return {
        field.name: Key(hints[field.name], _default_of(field), settings[field.name])
        for field in dataclasses.fields(section_type)
    }


def _default_of(field: "dataclasses.Field[Any]") -> Any:
    """The default of a key that is a table is {}; None if there is no default."""
    if field.default_factory is dict:
        return {}
    return None if field.default is dataclasses.MISSING else field.default


SECTIONS: Mapping[str, type] = {field.name: field.type for field in dataclasses.fields(JobConfig)}  # type: ignore[misc]


def keys_of(section: str, family: str | None) -> dict[str, Key]:
    """Key -> what it takes, of one section. [model] has the hyper-parameters of `family`, unless it is None."""
    keys = columns_of(SECTIONS[section])
    if section == "model":
        del keys["overrides"], keys["kept"]
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


def fields_of(values: Any) -> dict[str, Any]:
    """Field -> value of a dataclass, one level deep."""
    return {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}


def value_of(config: JobConfig, key: str) -> Any:
    """The value of a full key, as data.sources.0.path; of a hyper-parameter, that of the model."""
    section, name, *row = key.split(".")
    values = getattr(config, section)
    if row:
        return getattr(getattr(values, name)[int(row[0])], row[1])
    return getattr(values if section != "model" or hasattr(values, name) else config.hyper_parameters, name)
