"""Llama 3 in the format of Hugging Face's transformers: LlamaForCausalLM."""

from collections.abc import Mapping
from typing import Any

from titanlite.models.decoder.hf import FIELDS, IN_BLOCK, decoder_json, decoder_values, parameter_names
from titanlite.models.family import HuggingFace
from titanlite.models.hugging_face import given, refuse_invalid, refuse_other, rope_fields
from titanlite.models.llama3.config import Llama3Config, check

IN_SCALING = {
    "rope_scaling_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_seq_len": "original_max_position_embeddings",
}


def names(config: Llama3Config) -> dict[str, str]:
    return parameter_names(config, IN_BLOCK)


def config_json(config: Llama3Config) -> dict[str, Any]:
    """Without scaling its other hyper-parameters mean nothing, and are not written."""
    scaling = {"rope_type": "llama3"} | {there: getattr(config, here) for here, there in IN_SCALING.items()}
    return decoder_json(config) | {
        "mlp_bias": False,
        "rope_scaling": None if config.rope_scaling_factor == 1.0 else scaling,
    }


def config_from_json(fields: Mapping[str, Any]) -> Llama3Config:
    """Raises UserError for a field that is missing or invalid, or that asks for what is not computed here."""
    refuse_other(fields, {"mlp_bias": False})
    theta, scaling = rope_fields(fields, "llama3")
    stretch: dict[str, Any] = {}
    if scaling:
        stretch = {
            "rope_scaling_factor": given(scaling, "factor", float),
            "rope_low_freq_factor": given(scaling, "low_freq_factor", float),
            "rope_high_freq_factor": given(scaling, "high_freq_factor", float),
            "rope_original_seq_len": given(scaling, "original_max_position_embeddings", int),
        }
    config = Llama3Config(rope_theta=theta, **decoder_values(fields), **stretch)
    refuse_invalid(check(config, 1, 1, 1), FIELDS | IN_SCALING)
    refuse_other(fields, {"head_dim": config.head_dim})
    return config


HUGGING_FACE = HuggingFace("llama", "LlamaForCausalLM", names, config_json, config_from_json)
