"""Decoders in the format of Hugging Face's transformers: names of parameters, and the fields of config.json.

A field that is missing, or asks for what is not computed here, is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from titanlite.models.family import DecoderConfig
from titanlite.runtime.errors import Problem, UserError

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

_TOO_LARGE = 2**40
"""No number of a model is so large, and whoever computes with one that is may not end."""


def given(fields: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """The value of a field, as `kind`; `default` where it is absent.

    Raises UserError where that is None too, where it is of another kind, and where a number is too large for a model's.
    """
    value = fields.get(name)
    value = default if value is None else value
    if type(value) is int and abs(value) >= _TOO_LARGE:
        raise UserError(f"config.json: {name} is too large a number")
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        what = "is missing" if value is None else f"is {value!r}, not of type {kind.__name__}"
        raise UserError(f"config.json: {name} {what}")
    return value


def refuse_other(fields: Mapping[str, Any], computed: Mapping[str, Any]) -> None:
    """Raises UserError where a field is there with another value than the one that is computed here."""
    for name, value in computed.items():
        if fields.get(name, value) not in (value, None):
            raise UserError(f"config.json: {name} = {fields[name]!r}: this family has {value!r} only")


def refuse_invalid(problems: Sequence[Problem], names: Mapping[str, str]) -> None:
    """Raises UserError for the first of the problems that a family's check finds in hyper-parameters from config.json.

    names: of the fields, by the names of the hyper-parameters here.
    """
    if problems:
        first = problems[0]
        name = first.key.removeprefix("model.")
        raise UserError(f"config.json: {names.get(name, name)} = {first.value!r}: {first.rule} (here: {first.key})")


def rope_fields(fields: Mapping[str, Any], scaled: str | None) -> tuple[float, Mapping[str, Any]]:
    """(theta, the scaling's fields; {} for none), from rope_parameters of transformers 5, or as it was before.

    scaled: the one type of scaling that is computed, if any. Raises UserError for any other.
    """
    # Where both are there, transformers takes rope_scaling.
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    outside = {field: fields.get(field) for field in ("rope_theta", "partial_rotary_factor")}
    found = outside | given(fields, name, dict, {})
    refuse_other(found, {"partial_rotary_factor": 1.0})
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in ("default", scaled):
        types = " and ".join(repr(one) for one in ("default", scaled) if one)
        raise UserError(f"config.json: {name}.rope_type = {kind!r}: this family computes {types} only")
    if found.get("rope_theta") is None:
        raise UserError(
            "config.json: rope_theta is missing: write the one that the model was trained with; transformers takes "
            "10000.0 then, which is that of Llama 1 and 2"
        )
    return given(found, "rope_theta", float), found if kind == scaled else {}


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
