"""The hyper-parameters that a run keeps: those of its flavor as they were when it began."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from titanlite.checkpoint.compatibility import MISSING
from titanlite.checkpoint.manifest import Manifest
from titanlite.config.values import read_values
from titanlite.models.family import ModelConfig
from titanlite.models.registry import FAMILIES
from titanlite.runtime.errors import Problem

KEPT = "kept"
"""Table of [model] in the copy of a run's configuration: the field of ModelConfig, and what _FLAVOR names of then."""
_FLAVOR = ("family", "flavor")


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


def pop_kept(tables: Mapping[str, Any]) -> Any:
    """Remove the table KEPT from the tables of a configuration; None without one."""
    section = tables.get("model")
    if not isinstance(section, dict) or not isinstance(section.get(KEPT), dict):
        return None  # no table is an unknown key
    return section.pop(KEPT)


def read_kept(table: Mapping[str, Any] | None, family: str, flavor: str) -> tuple[dict[str, Any], list[Problem]]:
    """The kept hyper-parameters of a model, and the problems of those that are left out; none for those of another
    flavor, which a new run with the copy of this configuration has chosen."""
    values = dict(table or {})
    of_flavor = [values.pop(name, now) for name, now in zip(_FLAVOR, (family, flavor), strict=True)]
    if of_flavor != [family, flavor]:
        return {}, []
    read, problems = _read(values, family)
    return read, [replace(each, key=each.key.replace("model", f"model.{KEPT}", 1)) for each in problems]


def _read(values: Mapping[str, Any], family: str) -> tuple[dict[str, Any], list[Problem]]:
    """Hyper-parameters, and the problems of those that are left out."""
    read, problems = read_values({"model": dict(values)}, family)
    return read.get("model", {}), problems
