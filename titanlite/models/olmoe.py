"""OLMoE (Muennighoff et al., "OLMoE: Open Mixture-of-Experts Language Models", 2024): the decoder with a mixture of
experts in every block, and with RMSNorm over all heads of queries, and over all of keys, before the rotation."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from titanlite.models.decoder import TENSOR_STYLES as DECODER_STYLES
from titanlite.models.decoder import Decoder, check_decoder, check_width, decoder_plan, flops_per_token, init
from titanlite.models.experts import MixtureOfExperts
from titanlite.models.family import DecoderConfig, Family, HuggingFace, Plan, TensorStyle
from titanlite.models.hugging_face import BLOCK_NAMES as DECODER_BLOCK_NAMES
from titanlite.models.hugging_face import (
    EXPERT_FIELDS,
    FIELDS,
    decoder_json,
    decoder_values,
    expert_values,
    names_with_experts,
    refuse_invalid,
    refuse_other,
    rope_fields,
)
from titanlite.models.layers import Attention, WideNorm
from titanlite.runtime.errors import Problem


@dataclass(frozen=True)
class OlmoeConfig(DecoderConfig):
    """Hyper-parameters of the olmoe family. Each may be given in [model] and overrides the flavor's value."""

    dim: int
    """Width of the residual stream."""
    n_layers: int
    """Number of transformer blocks."""
    n_heads: int
    """Query heads; each is dim / n_heads wide."""
    n_kv_heads: int
    """Key/value heads, each shared by n_heads / n_kv_heads query heads."""
    ffn_dim: int
    """Width of the hidden layer of each expert."""
    vocab_size: int
    """Rows of the embedding and of the output, at least the tokenizer's vocabulary."""
    n_experts: int = 64
    """Experts in each block."""
    n_active_experts: int = 8
    """Experts that process each position: the most probable ones."""
    balance_loss: float = 0.01
    """Coefficient of the balance loss of each block, a mean over the rows of the global batch; 0.0: none.
    May change at a resume."""
    z_loss: float = 0.0
    """Coefficient of the z-loss of each router: the mean square of the logarithm of the sum of its exponentials.
    May change at a resume."""
    bias_rate: float = 0.0
    """Change per step of the biases that balance the choice of experts; 0.0: no biases. 0.001 is usual, with a small
    balance_loss. The published format has no biases: a run with them cannot be exported. May change at a resume, but
    not from or to 0."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm, also for queries and keys."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths."""
    max_seq_len: int = 4096
    """Maximum sequence length, and the length of the rotary tables."""
    tie_embeddings: bool = False
    """The output layer uses the embedding's weights."""

    @property
    def head_dim(self) -> int:  # type: ignore[override]
        """Width of one attention head."""
        return self.dim // self.n_heads


FLAVORS = {
    "debug": OlmoeConfig(
        dim=256, n_layers=4, n_heads=4, n_kv_heads=4, ffn_dim=256, vocab_size=2000, n_experts=8, n_active_experts=2
    ),
    "1B-7B": OlmoeConfig(dim=2048, n_layers=16, n_heads=16, n_kv_heads=16, ffn_dim=1024, vocab_size=50_304),
}
"""The published size, and a debug size for a laptop."""


class Olmoe(Decoder):
    """The decoder with experts whose weights are not normalized, and RMSNorm over all heads of queries and of keys."""

    def __init__(self, config: OlmoeConfig) -> None:
        experts = partial(MixtureOfExperts, config, normalize=False)
        super().__init__(config, partial(attention, config), feed_forward=experts)


def attention(config: OlmoeConfig) -> Attention:
    """Attention module of one block."""
    heads = (config.n_heads, config.n_kv_heads)
    norms = [WideNorm(number * config.head_dim, config.norm_eps) for number in heads]
    return Attention(config.dim, *heads, config.head_dim, *norms)


TENSOR_STYLES: dict[str, TensorStyle] = {
    **{name: style for name, style in DECODER_STYLES.items() if ".feed_forward." not in name},
    "layers.*.attention.q_norm": "wide_norm",
    "layers.*.attention.k_norm": "wide_norm",
    "layers.*.feed_forward.router": "router",
}


def plan(config: OlmoeConfig) -> Plan:
    return decoder_plan(config, TENSOR_STYLES)


def check(config: OlmoeConfig, seq_len: int, tp: int, pp: int) -> list[Problem]:
    return [*check_decoder(config, seq_len, tp, pp), *check_width(config)]


BLOCK_NAMES = {**DECODER_BLOCK_NAMES, "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
SUPPORTED = {"norm_topk_prob": False, "clip_qkv": None}


def names(config: OlmoeConfig) -> dict[str, str | tuple[str, ...]]:
    return names_with_experts(config, BLOCK_NAMES)


def config_json(config: OlmoeConfig) -> dict[str, Any]:
    """Fields of config.json. Without the special tokens that transformers would add: it does not train its default
    pad_token_id, 1."""
    return (
        decoder_json(config)
        | {theirs: getattr(config, ours) for ours, theirs in EXPERT_FIELDS.items()}
        | {"rope_scaling": None, "pad_token_id": None, "eos_token_id": None}
        | SUPPORTED
    )


def config_from_json(fields: Mapping[str, Any]) -> OlmoeConfig:
    """Hyper-parameters in config.json. Raises UserError if a field is missing, invalid or not supported."""
    refuse_other(fields, SUPPORTED)
    theta, _ = rope_fields(fields)
    values = decoder_values(fields) | expert_values(fields, OlmoeConfig.balance_loss)
    config = OlmoeConfig(rope_theta=theta, **values)
    refuse_invalid(check(config, 1, 1, 1), FIELDS | EXPERT_FIELDS)
    refuse_other(fields, {"head_dim": config.head_dim})
    return config


OLMOE = Family(
    name="olmoe",
    config_type=OlmoeConfig,
    flavors=FLAVORS,
    check=check,
    build=Olmoe,
    plan=plan,
    init=init,
    flops_per_token=flops_per_token,
    hugging_face=HuggingFace("olmoe", "OlmoeForCausalLM", names, config_json, config_from_json),
)
