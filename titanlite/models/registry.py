"""Table of the model families, and the choice by the [model] section."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from titanlite.models.deepseek_v3 import DEEPSEEK_V3
from titanlite.models.family import FAMILIES as FAMILIES
from titanlite.models.family import DecoderConfig, Family, LanguageModel, ModelConfig, Structure, resolve_model
from titanlite.models.gemma2 import GEMMA2
from titanlite.models.gemma3 import GEMMA3
from titanlite.models.gpt_oss import GPT_OSS
from titanlite.models.llama3 import LLAMA3
from titanlite.models.mistral import MISTRAL
from titanlite.models.olmo2 import OLMO2
from titanlite.models.olmo3 import OLMO3
from titanlite.models.olmoe import OLMOE
from titanlite.models.qwen2 import QWEN2
from titanlite.models.qwen3 import QWEN3
from titanlite.models.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from titanlite.models.qwen3_moe import QWEN3_MOE
from titanlite.models.qwen3_next import QWEN3_NEXT
from titanlite.models.smollm3 import SMOLLM3
from titanlite.models.transfer import roles_of
from titanlite.runtime.errors import Problem

SHIPPED = (
    *(LLAMA3, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, OLMO2, OLMO3, OLMOE, SMOLLM3),
    *(GEMMA2, GEMMA3, GPT_OSS, DEEPSEEK_V3),
)
FAMILIES.update({family.name: family for family in SHIPPED})


def full_parameters(section: ModelConfig) -> tuple[Mapping[str, nn.Parameter], Structure]:
    """The parameters of the full model by name, on the meta device, and its structure. The section must be valid."""
    family, hyper_parameters = resolve_model(section)
    return dict(full_model(section).named_parameters()), _full_structure(family.name, hyper_parameters)


@cache
def _full_structure(family_name: str, hyper_parameters: Any) -> Structure:
    return structure_of(FAMILIES[family_name], hyper_parameters, meta_model(family_name, hyper_parameters))


def structure_of(family: Family, config: Any, model: LanguageModel) -> Structure:
    """The structure of a full model, with the roles of its parameters."""
    structure = family.structure(config)
    return replace(structure, roles=roles_of(model, config, structure))


def full_model(section: ModelConfig) -> LanguageModel:
    """The full model, on the meta device. The section must be valid."""
    family, hyper_parameters = resolve_model(section)
    return meta_model(family.name, hyper_parameters)


@cache
def meta_model(family_name: str, hyper_parameters: Any) -> LanguageModel:
    """The full model of a family, on the meta device."""
    with torch.device("meta"):
        model = FAMILIES[family_name].build(hyper_parameters)
    model.tie_weights()
    return model


def check_model(section: ModelConfig, *, seq_len: int, tp: int, pp: int) -> list[Problem]:
    """Check the hyper-parameters for sequences of `seq_len` tokens and degrees tp and pp.

    Family, flavor, and the names and types of overrides must be valid.
    """
    family, config = resolve_model(section)
    problems = family.check(config, seq_len, tp, pp)
    if not problems and isinstance(config, DecoderConfig) and config.transfers:
        _, structure = full_parameters(section)
        unknown = [name for name, role in structure.roles.items() if role.width == "unknown"]
        if unknown:
            key = "base_dim" if config.base_dim else "base_layers"
            rule = f"0 with the family {family.name!r}: there is no rule for {unknown[0]}"
            problems = [Problem(f"model.{key}", getattr(config, key), rule, "leave it out")]
    return problems
