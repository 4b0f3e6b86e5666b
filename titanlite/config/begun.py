"""The hyper-parameters that a run keeps: those of its flavor as they were when it began."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from titanlite.checkpoint.compatibility import MISSING
from titanlite.checkpoint.manifest import Manifest
from titanlite.config.values import read_values, unknown_key
from titanlite.models.family import ModelConfig
from titanlite.models.registry import FAMILIES
from titanlite.runtime.errors import Problem

KEPT = "kept"
"""Table of [model] in the copy of a run's configuration: the field of ModelConfig."""


def with_begun_model(model: ModelConfig, begun: Manifest) -> ModelConfig:
    """The section with the values that its flavor had when the run of a checkpoint began, where it has others by now:
    a later version of titanlite may have corrected them, which must not change a run.

    What the run's own configuration gave then or gives now is not a value of the flavor: it is compared as ever.
    """
    section, facts = begun.config.get("model", {}), begun.facts.get("model", {})
    then = (section.get("family"), section.get("flavor"), facts.get("family"))
    if then != (model.family, model.flavor, model.family):
        return model
    now = json.loads(json.dumps(asdict(FAMILIES[model.family].flavors[model.flavor])))
    given = {*section.get("overrides", {}), *model.overrides}
    known = {**MISSING, **facts}
    kept = {key: known[key] for key, value in now.items() if key in known and key not in given and known[key] != value}
    # A value of a wrong type is left out, so the resume is refused for it.
    return replace(model, kept={**model.kept, **_read(kept, model.family)[0]})


def pop_kept(tables: Mapping[str, Any], family: str | None) -> tuple[dict[str, Any], list[Problem]]:
    """Remove the kept hyper-parameters from the tables of a configuration: (by name, their problems)."""
    section = tables.get("model")
    if family is None or not isinstance(section, dict) or not isinstance(section.get(KEPT), dict):
        return {}, []  # no table is an unknown key
    return _read(section.pop(KEPT), family)


def _read(values: Mapping[str, Any], family: str) -> tuple[dict[str, Any], list[Problem]]:
    """Hyper-parameters, and the problems of those that are left out."""
    names = [name for name in values if name in ("family", "flavor")]
    others = {name: value for name, value in values.items() if name not in names}
    read, problems = read_values({"model": others}, family)
    return read.get("model", {}), [*problems, *(unknown_key(f"model.{KEPT}.{name}", "", family) for name in names)]
