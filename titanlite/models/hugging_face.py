"""Decoders in the format of Hugging Face's transformers: names of parameters, and the fields of config.json.

A missing field, or a value that no decoder here supports, raises UserError.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from titanlite.models.family import DecoderConfig
from titanlite.runtime.errors import Problem, UserError

MODULE_NAMES = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
BLOCK_NAMES = {
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
"""The field of config.json of each hyper-parameter."""

EXPERT_FIELDS = {
    "n_experts": "num_experts",
    "n_active_experts": "num_experts_per_tok",
    "balance_loss": "router_aux_loss_coef",
}
"""Those of experts."""
EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

SUPPORTED_VALUES = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "quantization_config": None,
}
"""Fields with a single supported value, which is also their default."""

_TOO_LARGE = 2**40
"""Integers from here on are invalid in any model; computing with them might not terminate."""


def read_field(fields: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """Value of a field, as `kind`; `default` if the field is absent.

    Raises UserError if the field is absent and has no default, has another type, or is too large an integer.
    """
    value = fields.get(name)
    value = default if value is None else value
    if type(value) is int and abs(value) >= _TOO_LARGE:
        raise UserError(f"config.json: {name} is a number of 2^40 or more: write the model's value")
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        what = "is missing" if value is None else f"is {value!r}, not of type {kind.__name__}"
        raise UserError(f"config.json: {name} {what}: write the model's value, or download the file again")
    return value


def refuse_other(fields: Mapping[str, Any], supported: Mapping[str, Any]) -> None:
    """Raise UserError if a field is present with a value other than the supported one."""
    for name, value in supported.items():
        if fields.get(name, value) not in (value, None):
            raise UserError(f"config.json: {name} = {fields[name]!r}: this family supports only {value!r}")


def refuse_invalid(problems: Sequence[Problem], names: Mapping[str, str]) -> None:
    """Raise UserError for the first of the problems that a family's check found in hyper-parameters from config.json.

    names: the field of config.json of each hyper-parameter.
    """
    if problems:
        first = problems[0]
        name = first.key.removeprefix("model.")
        raise UserError(f"config.json: {names.get(name, name)} = {first.value!r}: {first.rule} (as {first.key})")


def rope_fields(fields: Mapping[str, Any], scaled: str | None = None) -> tuple[float, Mapping[str, Any]]:
    """(theta, fields of the scaling or {}), from rope_parameters (transformers 5) or rope_theta and rope_scaling.

    scaled: the supported type of scaling, if there is one. Raises UserError for any other type.
    """
    # If both are present, transformers takes rope_scaling.
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    outside = {field: fields.get(field) for field in ("rope_theta", "partial_rotary_factor")}
    found = outside | read_field(fields, name, dict, {})
    refuse_other(found, {"partial_rotary_factor": 1.0})
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in ("default", scaled):
        supported = " and ".join(repr(each) for each in ("default", scaled) if each is not None)
        raise UserError(f"config.json: {name}.rope_type = {kind!r}: this family supports only {supported}")
    if found.get("rope_theta") is None:
        raise UserError(
            "config.json: rope_theta is missing: add the value that the model was trained with; transformers would "
            "fall back to 10000.0, the value of Llama 1 and 2"
        )
    return read_field(found, "rope_theta", float), found if kind == scaled else {}


def parameter_names(config: DecoderConfig, block_names: Mapping[str, str]) -> dict[str, str | tuple[str, ...]]:
    """Names of all parameters in transformers, by their names in titanlite. block_names: of the modules of a block."""
    modules = {
        f"layers.{index}.{ours}": f"model.layers.{index}.{theirs}"
        for index in range(config.n_layers)
        for ours, theirs in block_names.items()
    }
    modules |= {ours: theirs for ours, theirs in MODULE_NAMES.items() if ours != "output" or not config.tie_embeddings}
    return {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in modules.items()}


def names_with_experts(config: DecoderConfig, block_names: Mapping[str, str]) -> dict[str, str | tuple[str, ...]]:
    """As parameter_names, with a mixture of experts in place of the feed-forward of each block."""
    kept = {ours: theirs for ours, theirs in block_names.items() if not ours.startswith("feed_forward")}
    found = parameter_names(config, kept | {"feed_forward.router": "mlp.gate"})
    for index in range(config.n_layers):
        for ours, theirs in EXPERT_NAMES.items():
            found[f"layers.{index}.feed_forward.experts.{ours}"] = tuple(
                f"model.layers.{index}.mlp.experts.{expert}.{theirs}.weight" for expert in range(config.n_experts)
            )
    return found


def stored_names(name: str | tuple[str, ...]) -> tuple[str, ...]:
    """The names of the stored tensors of a parameter, of which HuggingFace.names has one or several."""
    return (name,) if isinstance(name, str) else name


def stored_tensors(parameter: Tensor, name: str | tuple[str, ...]) -> dict[str, Tensor]:
    """The stored tensors of a parameter by their names, as views."""
    return {name: parameter} if isinstance(name, str) else dict(zip(name, parameter.unbind(), strict=True))


def decoder_json(config: DecoderConfig) -> dict[str, Any]:
    """Fields of config.json for all decoders; rope_theta at the top level, which all versions of transformers read."""
    supported = {name: value for name, value in SUPPORTED_VALUES.items() if value is not None}
    return {theirs: getattr(config, ours) for ours, theirs in FIELDS.items()} | supported


def decoder_values(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters of all decoders, except head_dim and those of rotary embeddings.

    Raises UserError if a field is missing, or has a value that no decoder here supports.
    """
    refuse_other(fields, SUPPORTED_VALUES)
    n_heads = read_field(fields, "num_attention_heads", int)
    return {
        "dim": read_field(fields, "hidden_size", int),
        "n_layers": read_field(fields, "num_hidden_layers", int),
        "n_heads": n_heads,
        "n_kv_heads": read_field(fields, "num_key_value_heads", int, n_heads),
        "ffn_dim": read_field(fields, "intermediate_size", int),
        "vocab_size": read_field(fields, "vocab_size", int),
        "norm_eps": read_field(fields, "rms_norm_eps", float),
        "max_seq_len": read_field(fields, "max_position_embeddings", int),
        "tie_embeddings": read_field(fields, "tie_word_embeddings", bool, False),
    }


def expert_values(fields: Mapping[str, Any], balance_loss: float) -> dict[str, Any]:
    """Hyper-parameters of experts. balance_loss: its default. Raises UserError if a field is missing or invalid."""
    if fields.get("output_router_logits"):
        raise UserError(
            "config.json: output_router_logits = true: transformers then adds a balance loss over all positions of a "
            "microbatch, which depends on the batch size of a rank: write false. model.balance_loss is over rows"
        )
    number = "num_local_experts" if "num_local_experts" in fields else "num_experts"  # transformers 5 and 4
    return {
        "n_experts": read_field(fields, number, int),
        "n_active_experts": read_field(fields, "num_experts_per_tok", int),
        "balance_loss": read_field(fields, "router_aux_loss_coef", float, balance_loss),
    }
