"""Llama 3 in the format of Hugging Face's transformers: LlamaForCausalLM."""

from collections.abc import Mapping
from typing import Any

from titanlite.models.family import HuggingFace
from titanlite.models.hugging_face import given, refuse_other, rope_fields
from titanlite.models.llama3.config import Llama3Config

OUTSIDE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def names(config: Llama3Config) -> dict[str, str]:
    found = {
        f"layers.{index}.{here}.weight": f"model.layers.{index}.{there}.weight"
        for index in range(config.n_layers)
        for here, there in IN_BLOCK.items()
    }
    tied = ("output.weight",) if config.tie_embeddings else ()
    return found | {here: there for here, there in OUTSIDE.items() if here not in tied}


def config_json(config: Llama3Config) -> dict[str, Any]:
    """rope_theta and rope_scaling stand as in the published folders: both older and newer transformers read them."""
    scaling = {
        "rope_type": "llama3",
        "factor": config.rope_scaling_factor,
        "low_freq_factor": config.rope_low_freq_factor,
        "high_freq_factor": config.rope_high_freq_factor,
        "original_max_position_embeddings": config.rope_original_seq_len,
    }
    return {
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_seq_len,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling_factor == 1.0 else scaling,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def config_from_json(fields: Mapping[str, Any]) -> Llama3Config:
    """Raises UserError for a field that is missing, or that asks for what is not computed here."""
    dim, n_heads = given(fields, "hidden_size", int), given(fields, "num_attention_heads", int)
    refuse_other(fields, {"head_dim": dim // n_heads, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False})
    theta, scaling = rope_fields(fields, "llama3")
    stretch: dict[str, Any] = {}
    if scaling:
        stretch = {
            "rope_scaling_factor": given(scaling, "factor", float),
            "rope_low_freq_factor": given(scaling, "low_freq_factor", float),
            "rope_high_freq_factor": given(scaling, "high_freq_factor", float),
            "rope_original_seq_len": given(scaling, "original_max_position_embeddings", int),
        }
    return Llama3Config(
        dim=dim,
        n_layers=given(fields, "num_hidden_layers", int),
        n_heads=n_heads,
        n_kv_heads=given(fields, "num_key_value_heads", int, n_heads),
        ffn_dim=given(fields, "intermediate_size", int),
        vocab_size=given(fields, "vocab_size", int),
        norm_eps=given(fields, "rms_norm_eps", float),
        rope_theta=theta,
        max_seq_len=given(fields, "max_position_embeddings", int),
        tie_embeddings=given(fields, "tie_word_embeddings", bool, False),
        **stretch,
    )


HUGGING_FACE = HuggingFace("llama", "LlamaForCausalLM", names, config_json, config_from_json)
