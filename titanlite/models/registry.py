"""Table of the model families, and the choice by the [model] section."""

from dataclasses import replace
from typing import Any

from titanlite.models.family import Family, ModelConfig
from titanlite.models.llama3 import LLAMA3
from titanlite.models.olmoe import OLMOE
from titanlite.models.qwen3 import QWEN3
from titanlite.models.qwen3_moe import QWEN3_MOE
from titanlite.runtime.errors import Problem

FAMILIES: dict[str, Family] = {
    LLAMA3.name: LLAMA3,
    QWEN3.name: QWEN3,
    QWEN3_MOE.name: QWEN3_MOE,
    OLMOE.name: OLMOE,
}


def resolve_model(section: ModelConfig) -> tuple[Family, Any]:
    """The family of `section`, and its hyper-parameters: those of the flavor with the overrides.

    Raises KeyError if the family or flavor is unknown, TypeError if an override is.
    """
    family = FAMILIES[section.family]
    flavor = family.flavors[section.flavor]
    return family, replace(flavor, **section.overrides) if section.overrides else flavor


def check_model(section: ModelConfig, *, seq_len: int, tp: int, pp: int) -> list[Problem]:
    """Check the hyper-parameters for sequences of `seq_len` tokens and degrees tp and pp.

    Family, flavor, and the names and types of overrides must be valid.
    """
    family, config = resolve_model(section)
    return family.check(config, seq_len, tp, pp)
