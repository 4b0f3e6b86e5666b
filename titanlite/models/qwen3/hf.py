"""Qwen3 in the format of Hugging Face's transformers: Qwen3ForCausalLM."""

from collections.abc import Mapping
from typing import Any

from titanlite.models.decoder.hf import FIELDS, decoder_json, decoder_values, parameter_names
from titanlite.models.decoder.hf import IN_BLOCK as OF_ANY_DECODER
from titanlite.models.family import HuggingFace
from titanlite.models.hugging_face import given, refuse_invalid, refuse_other, rope_fields
from titanlite.models.qwen3.config import Qwen3Config, check

IN_BLOCK = {
    **OF_ANY_DECODER,
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
}


def names(config: Qwen3Config) -> dict[str, str]:
    return parameter_names(config, IN_BLOCK)


def config_json(config: Qwen3Config) -> dict[str, Any]:
    return decoder_json(config) | {"rope_scaling": None, "use_sliding_window": False}


def config_from_json(fields: Mapping[str, Any]) -> Qwen3Config:
    """Raises UserError for a field that is missing or invalid, or that asks for what is not computed here."""
    refuse_other(fields, {"use_sliding_window": False})
    for kind in given(fields, "layer_types", list, []):
        refuse_other({"layer_types": kind}, {"layer_types": "full_attention"})
    theta, _ = rope_fields(fields, None)
    # transformers has a head_dim of 128 too where config.json has none.
    head_dim = given(fields, "head_dim", int, Qwen3Config.head_dim)
    config = Qwen3Config(head_dim=head_dim, rope_theta=theta, **decoder_values(fields))
    refuse_invalid(check(config, 1, 1, 1), FIELDS)
    return config


HUGGING_FACE = HuggingFace("qwen3", "Qwen3ForCausalLM", names, config_json, config_from_json)
