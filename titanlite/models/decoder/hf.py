"""What decoders have in common in the format of Hugging Face's transformers."""

from collections.abc import Mapping
from typing import Any

from titanlite.models.decoder.config import DecoderConfig
from titanlite.models.hugging_face import given, refuse_other

OUTSIDE = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
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
FIELDS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "max_seq_len": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
}
"""Hyper-parameters by their names here."""

ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "quantization_config": None,
}
"""Fields of which one value is computed here, which is also what a missing one means."""


def parameter_names(config: DecoderConfig, in_block: Mapping[str, str]) -> dict[str, str]:
    """The name there of each parameter. in_block: the modules of a block, by their names here."""
    modules = {
        f"layers.{index}.{here}": f"model.layers.{index}.{there}"
        for index in range(config.n_layers)
        for here, there in in_block.items()
    }
    modules |= {here: there for here, there in OUTSIDE.items() if here != "output" or not config.tie_embeddings}
    return {f"{here}.weight": f"{there}.weight" for here, there in modules.items()}


def decoder_json(config: DecoderConfig) -> dict[str, Any]:
    """The fields of all decoders; rope_theta stands as in the published folders, which old and new versions read."""
    computed = {name: value for name, value in ONLY.items() if value is not None}
    return {there: getattr(config, here) for here, there in FIELDS.items()} | computed


def decoder_values(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of all decoders but head_dim and what is about rotary embeddings.

    Raises UserError for a field that is missing, or that asks for what no decoder here computes.
    """
    refuse_other(fields, ONLY)
    n_heads = given(fields, "num_attention_heads", int)
    return {
        "dim": given(fields, "hidden_size", int),
        "n_layers": given(fields, "num_hidden_layers", int),
        "n_heads": n_heads,
        "n_kv_heads": given(fields, "num_key_value_heads", int, n_heads),
        "ffn_dim": given(fields, "intermediate_size", int),
        "vocab_size": given(fields, "vocab_size", int),
        "norm_eps": given(fields, "rms_norm_eps", float),
        "max_seq_len": given(fields, "max_position_embeddings", int),
        "tie_embeddings": given(fields, "tie_word_embeddings", bool, False),
    }
