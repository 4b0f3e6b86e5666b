"""Qwen3, dense (Qwen Team, "Qwen3 Technical Report", 2025): the decoder with an independent head width, and with
RMSNorm on each head of queries and keys before the rotation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_type_hints

from torch import nn

from titanlite.models.decoder import TENSOR_STYLES as DECODER_STYLES
from titanlite.models.decoder import Decoder, check_decoder, decoder_plan, flops_per_token, init
from titanlite.models.family import DecoderConfig, Family, HuggingFace, Plan, TensorStyle
from titanlite.models.hugging_face import BLOCK_NAMES as DECODER_BLOCK_NAMES
from titanlite.models.hugging_face import (
    FIELDS,
    decoder_json,
    decoder_values,
    parameter_names,
    read_field,
    refuse_invalid,
    refuse_other,
    rope_fields,
)
from titanlite.models.layers import Attention, RMSNorm, YarnScaling
from titanlite.runtime.errors import Problem, Rules
from titanlite.runtime.settings import Needs


@dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    """Hyper-parameters of the qwen3 family. Each may be given in [model] and overrides the flavor's value."""

    dim: int
    """Width of the residual stream."""
    n_layers: int
    """Number of transformer blocks."""
    n_heads: int
    """Query heads."""
    n_kv_heads: int
    """Key/value heads, each shared by n_heads / n_kv_heads query heads."""
    ffn_dim: int
    """Width of the feed-forward's hidden layer."""
    vocab_size: int
    """Rows of the embedding and of the output, at least the tokenizer's vocabulary."""
    head_dim: int = 128
    """Width of each head; n_heads x head_dim may differ from dim."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm, also for queries and keys."""
    rope_theta: float = 1_000_000.0
    """Base of the rotary wavelengths."""
    rope_scaling_factor: float = 1.0
    """Factor by which YaRN stretches long rotary wavelengths; 1.0: no scaling."""
    rope_beta_fast: float = 32.0
    """Pairs that make more turns than this within rope_original_seq_len are not stretched."""
    rope_beta_slow: float = 1.0
    """Pairs that make fewer turns than this within rope_original_seq_len are stretched by the full factor."""
    rope_original_seq_len: int = 32_768
    """Context length before the scaling."""
    max_seq_len: int = 40_960
    """Maximum sequence length, and the length of the rotary tables."""
    tie_embeddings: bool = False
    """The output layer uses the embedding's weights."""


_SMALL = Qwen3Config(
    dim=1024, n_layers=28, n_heads=16, n_kv_heads=8, ffn_dim=3072, vocab_size=151_936, tie_embeddings=True
)
_LARGE = Qwen3Config(dim=4096, n_layers=36, n_heads=32, n_kv_heads=8, ffn_dim=12_288, vocab_size=151_936)

FLAVORS = {
    "debug": Qwen3Config(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=768, vocab_size=2000, head_dim=64),
    "0.6B": _SMALL,
    "1.7B": replace(_SMALL, dim=2048, ffn_dim=6144),
    "4B": replace(_SMALL, dim=2560, n_layers=36, n_heads=32, ffn_dim=9728),
    "8B": _LARGE,
    "14B": replace(_LARGE, dim=5120, n_layers=40, n_heads=40, ffn_dim=17_408),
    "32B": replace(_LARGE, dim=5120, n_layers=64, n_heads=64, ffn_dim=25_600),
}
"""Published dense sizes, and a debug size for a laptop.

max_seq_len is that of the post-trained models. The base models' config.json has 32,768; up to that length both compute
the same.
"""


class Qwen3(Decoder):
    """The decoder with an independent head width, RMSNorm on each head of queries and keys, and YaRN if its factor is
    above 1."""

    def __init__(self, config: Qwen3Config, feed_forward: Callable[[], nn.Module] | None = None) -> None:
        scaling = YarnScaling(
            config.rope_scaling_factor,
            config.rope_theta,
            config.rope_beta_fast,
            config.rope_beta_slow,
            config.rope_original_seq_len,
        )
        used = scaling if config.rope_scaling_factor > 1.0 else None
        super().__init__(config, partial(attention, config), used, feed_forward)


def attention(config: Qwen3Config) -> Attention:
    """Attention module of one block."""
    norms = [RMSNorm(config.head_dim, config.norm_eps) for _ in range(2)]
    return Attention(config.dim, config.n_heads, config.n_kv_heads, config.head_dim, *norms)


TENSOR_STYLES: dict[str, TensorStyle] = {
    **DECODER_STYLES,
    "layers.*.attention.q_norm": "head_norm",
    "layers.*.attention.k_norm": "head_norm",
}


def plan(config: Qwen3Config) -> Plan:
    return decoder_plan(config, TENSOR_STYLES)


def check(config: Qwen3Config, seq_len: int, tp: int, pp: int) -> list[Problem]:
    rules = Rules("model", config, check_decoder(config, seq_len, tp, pp))
    rules.require("head_dim", config.head_dim % 2 == 0, "even, since rotary embeddings rotate pairs", "128 is usual")
    slow, fast = config.rope_beta_slow, config.rope_beta_fast
    rule = f"below model.rope_beta_fast = {fast}"
    rules.require("rope_beta_slow", slow < fast, rule, "1.0 and 32.0 are what Qwen3 uses")
    return rules.problems


SCALING_FIELDS = {
    "rope_scaling_factor": "factor",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_original_seq_len": "original_max_position_embeddings",
}
SUPPORTED_SCALING = {"attention_factor": None, "mscale": None, "mscale_all_dim": None, "truncate": True}
"""Fields of YaRN in config.json that other models change."""


BLOCK_NAMES = {**DECODER_BLOCK_NAMES, "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}


def names(config: Qwen3Config) -> dict[str, str | tuple[str, ...]]:
    return parameter_names(config, BLOCK_NAMES)


def config_json(config: Qwen3Config) -> dict[str, Any]:
    """Fields of config.json; those of the scaling are left out if the factor is 1."""
    scaling = {"rope_type": "yarn"} | {theirs: getattr(config, ours) for ours, theirs in SCALING_FIELDS.items()}
    return decoder_json(config) | {
        "rope_scaling": None if config.rope_scaling_factor == 1.0 else scaling,
        "use_sliding_window": False,
    }


def config_from_json(fields: Mapping[str, Any]) -> Qwen3Config:
    """Hyper-parameters in config.json. Raises UserError if a field is missing, invalid or not supported."""
    config = Qwen3Config(**values_from_json(fields))
    refuse_invalid(check(config, 1, 1, 1), FIELDS | SCALING_FIELDS)
    return config


def values_from_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The values of config_from_json, not yet checked."""
    refuse_other(fields, {"use_sliding_window": False})
    for kind in read_field(fields, "layer_types", list, []):
        refuse_other({"layer_types": kind}, {"layer_types": "full_attention"})
    theta, scaling = rope_fields(fields, "yarn")
    refuse_other(scaling, SUPPORTED_SCALING)
    kinds = get_type_hints(Qwen3Config)
    optional = {name: getattr(Qwen3Config, name) for name in ("rope_beta_fast", "rope_beta_slow")}
    present = SCALING_FIELDS if scaling else {}
    scaling_values = {
        ours: read_field(scaling, theirs, kinds[ours], optional.get(ours)) for ours, theirs in present.items()
    }
    # The default, 128, is also that of transformers.
    head_dim = read_field(fields, "head_dim", int, Qwen3Config.head_dim)
    return decoder_values(fields) | {"head_dim": head_dim, "rope_theta": theta} | scaling_values


_SCALES = Needs("model.rope_scaling_factor above 1", lambda config: config.rope_scaling_factor > 1)
NEEDS = dict.fromkeys(("rope_beta_fast", "rope_beta_slow", "rope_original_seq_len"), _SCALES)
"""See Needs."""

QWEN3 = Family(
    name="qwen3",
    config_type=Qwen3Config,
    flavors=FLAVORS,
    check=check,
    build=Qwen3,
    plan=plan,
    init=init,
    flops_per_token=flops_per_token,
    hugging_face=HuggingFace("qwen3", "Qwen3ForCausalLM", names, config_json, config_from_json),
    needs=NEEDS,
)
