"""Model families: one line of the table each."""

from dataclasses import replace
from typing import Any

from titanlite.models.family import Family, ModelConfig
from titanlite.models.llama3 import LLAMA3
from titanlite.models.qwen3 import QWEN3
from titanlite.runtime.errors import Problem

FAMILIES: dict[str, Family] = {
    LLAMA3.name: LLAMA3,
    QWEN3.name: QWEN3,
}


def resolve_model(section: ModelConfig) -> tuple[Family, Any]:
    """The family that `section` names, and its hyper-parameters: the flavor's, with the overrides in their place.

    KeyError where family or flavor is unknown, TypeError where an override is.
    """
    family = FAMILIES[section.family]
    return family, replace(family.flavors[section.flavor], **section.overrides)


def check_model(section: ModelConfig, *, seq_len: int, tp: int, pp: int) -> list[Problem]:
    """What is wrong with the hyper-parameters, for training on sequences of `seq_len` tokens on these degrees.

    Family, flavor, and the overrides' names and types are taken to be valid.
    """
    family, config = resolve_model(section)
    return family.check(config, seq_len, tp, pp)
