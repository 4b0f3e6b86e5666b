"""Llama 3 (Grattafiori et al., "The Llama 3 Herd of Models", 2024): the decoder with Llama 3.1's rotary scaling."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_type_hints

from titanlite.models.decoder import (
    TENSOR_STYLES,
    Decoder,
    check_decoder,
    check_width,
    decoder_plan,
    flops_per_token,
    init,
)
from titanlite.models.family import DecoderConfig, Family, HuggingFace, Plan
from titanlite.models.hugging_face import (
    BLOCK_NAMES,
    FIELDS,
    decoder_json,
    decoder_values,
    parameter_names,
    read_field,
    refuse_invalid,
    refuse_other,
    rope_fields,
)
from titanlite.models.layers import Attention, Llama3Scaling
from titanlite.runtime.errors import Problem, Rules
from titanlite.runtime.settings import Needs


@dataclass(frozen=True)
class Llama3Config(DecoderConfig):
    """Hyper-parameters of the llama3 family. Each may be given in [model] and overrides the flavor's value."""

    dim: int
    """Width of the residual stream."""
    n_layers: int
    """Number of transformer blocks."""
    n_heads: int
    """Query heads; each is dim / n_heads wide."""
    n_kv_heads: int
    """Key/value heads, each shared by n_heads / n_kv_heads query heads."""
    ffn_dim: int
    """Width of the feed-forward's hidden layer."""
    vocab_size: int
    """Rows of the embedding and of the output, at least the tokenizer's vocabulary."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    rope_theta: float = 500_000.0
    """Base of the rotary wavelengths."""
    rope_scaling_factor: float = 1.0
    """Factor by which Llama 3.1's scaling stretches long rotary wavelengths; 1.0: no scaling."""
    rope_low_freq_factor: float = 1.0
    """Wavelengths above rope_original_seq_len / rope_low_freq_factor are stretched by the full factor."""
    rope_high_freq_factor: float = 4.0
    """Wavelengths below rope_original_seq_len / rope_high_freq_factor are not stretched."""
    rope_original_seq_len: int = 8192
    """Context length before the scaling."""
    max_seq_len: int = 131_072
    """Maximum sequence length, and the length of the rotary tables."""
    tie_embeddings: bool = False
    """The output layer uses the embedding's weights."""

    @property
    def head_dim(self) -> int:  # type: ignore[override]
        """Width of one attention head."""
        return self.dim // self.n_heads


_VOCAB_SIZE = 128_256

_LLAMA_3_2_1B = Llama3Config(
    dim=2048,
    n_layers=16,
    n_heads=32,
    n_kv_heads=8,
    ffn_dim=8192,
    vocab_size=_VOCAB_SIZE,
    rope_scaling_factor=32.0,
    tie_embeddings=True,
)
_LLAMA_3_1_8B = Llama3Config(
    dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14_336, vocab_size=_VOCAB_SIZE, rope_scaling_factor=8.0
)

FLAVORS = {
    "debug": Llama3Config(dim=256, n_layers=6, n_heads=16, n_kv_heads=16, ffn_dim=768, vocab_size=2000),
    "1B": _LLAMA_3_2_1B,
    "3B": replace(_LLAMA_3_2_1B, dim=3072, n_layers=28, n_heads=24),
    "8B": _LLAMA_3_1_8B,
    "70B": replace(_LLAMA_3_1_8B, dim=8192, n_layers=80, n_heads=64, ffn_dim=28_672),
    "405B": replace(_LLAMA_3_1_8B, dim=16_384, n_layers=126, n_heads=128, ffn_dim=53_248),
}
"""Published sizes (1B and 3B: Llama 3.2; 8B, 70B and 405B: Llama 3.1), and a debug size for a laptop."""


class Llama3(Decoder):
    """The decoder with Llama 3.1's rotary scaling."""

    def __init__(self, config: Llama3Config) -> None:
        scaling = Llama3Scaling(
            config.rope_scaling_factor,
            config.rope_low_freq_factor,
            config.rope_high_freq_factor,
            config.rope_original_seq_len,
        )
        super().__init__(config, partial(attention, config), scaling)


def attention(config: Llama3Config) -> Attention:
    """Attention module of one block."""
    return Attention(config.dim, config.n_heads, config.n_kv_heads, config.head_dim)


def plan(config: Llama3Config) -> Plan:
    return decoder_plan(config, TENSOR_STYLES)


def check(config: Llama3Config, seq_len: int, tp: int, pp: int) -> list[Problem]:
    rules = Rules("model", config, [*check_decoder(config, seq_len, tp, pp), *check_width(config)])
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    rule = f"below model.rope_high_freq_factor = {high}"
    rules.require("rope_low_freq_factor", low < high, rule, "1.0 and 4.0 are what Llama 3.1 uses")
    return rules.problems


SCALING_FIELDS = {
    "rope_scaling_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_seq_len": "original_max_position_embeddings",
}


def names(config: Llama3Config) -> dict[str, str | tuple[str, ...]]:
    return parameter_names(config, BLOCK_NAMES)


def config_json(config: Llama3Config) -> dict[str, Any]:
    """Fields of config.json; those of the scaling are left out if the factor is 1."""
    scaling = {"rope_type": "llama3"} | {theirs: getattr(config, ours) for ours, theirs in SCALING_FIELDS.items()}
    return decoder_json(config) | {
        "mlp_bias": False,
        "rope_scaling": None if config.rope_scaling_factor == 1.0 else scaling,
    }


def config_from_json(fields: Mapping[str, Any]) -> Llama3Config:
    """Hyper-parameters in config.json. Raises UserError if a field is missing, invalid or not supported."""
    refuse_other(fields, {"mlp_bias": False})
    theta, scaling = rope_fields(fields, "llama3")
    kinds = get_type_hints(Llama3Config)
    present = SCALING_FIELDS if scaling else {}
    scaling_values = {ours: read_field(scaling, theirs, kinds[ours]) for ours, theirs in present.items()}
    config = Llama3Config(rope_theta=theta, **decoder_values(fields), **scaling_values)
    refuse_invalid(check(config, 1, 1, 1), FIELDS | SCALING_FIELDS)
    refuse_other(fields, {"head_dim": config.head_dim})
    return config


_SCALES = Needs("model.rope_scaling_factor above 1", lambda config: config.rope_scaling_factor > 1)
NEEDS = dict.fromkeys(("rope_low_freq_factor", "rope_high_freq_factor", "rope_original_seq_len"), _SCALES)
"""See Needs."""

LLAMA3 = Family(
    name="llama3",
    config_type=Llama3Config,
    flavors=FLAVORS,
    check=check,
    build=Llama3,
    plan=plan,
    init=init,
    flops_per_token=flops_per_token,
    hugging_face=HuggingFace("llama", "LlamaForCausalLM", names, config_json, config_from_json),
    needs=NEEDS,
)
