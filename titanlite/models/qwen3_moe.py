"""Qwen3-MoE (Qwen Team, "Qwen3 Technical Report", 2025): Qwen3 with a mixture of experts in every block."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from titanlite.models import qwen3
from titanlite.models.decoder import decoder_plan, flops_per_token, init
from titanlite.models.experts import MixtureOfExperts
from titanlite.models.family import Family, HuggingFace, Plan, TensorStyle
from titanlite.models.hugging_face import (
    EXPERT_FIELDS,
    FIELDS,
    expert_values,
    names_with_experts,
    read_field,
    refuse_invalid,
    refuse_other,
)
from titanlite.models.qwen3 import NEEDS, SCALING_FIELDS, Qwen3, Qwen3Config


@dataclass(frozen=True)
class Qwen3MoeConfig(Qwen3Config):
    """Hyper-parameters of the qwen3_moe family. Each may be given in [model] and overrides the flavor's value."""

    ffn_dim: int
    """Width of the hidden layer of each expert."""
    n_experts: int = 128
    """Experts in each block."""
    n_active_experts: int = 8
    """Experts that process each position: the most probable ones."""
    balance_loss: float = 0.001
    """Coefficient of the balance loss of each block, a mean over the rows of the global batch; 0.0: none.
    May change at a resume."""
    z_loss: float = 0.0
    """Coefficient of the z-loss of each router: the mean square of the logarithm of the sum of its exponentials.
    May change at a resume."""
    bias_rate: float = 0.0
    """Change per step of the biases that balance the choice of experts; 0.0: no biases. 0.001 is usual, with a small
    balance_loss. The published format has no biases: a run with them cannot be exported. May change at a resume, but
    not from or to 0."""


_30B = Qwen3MoeConfig(dim=2048, n_layers=48, n_heads=32, n_kv_heads=4, ffn_dim=768, vocab_size=151_936)

FLAVORS = {
    "debug": Qwen3MoeConfig(
        dim=256,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        ffn_dim=256,
        vocab_size=2000,
        head_dim=64,
        n_experts=8,
        n_active_experts=2,
    ),
    "30B-A3B": _30B,
    "235B-A22B": replace(_30B, dim=4096, n_layers=94, n_heads=64, ffn_dim=1536),
}
"""Published sizes, and a debug size for a laptop."""


class Qwen3Moe(Qwen3):
    """Qwen3 with experts."""

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__(config, partial(MixtureOfExperts, config))


TENSOR_STYLES: dict[str, TensorStyle] = {
    **{name: style for name, style in qwen3.TENSOR_STYLES.items() if ".feed_forward." not in name},
    "layers.*.feed_forward.router": "router",
}


def plan(config: Qwen3MoeConfig) -> Plan:
    return decoder_plan(config, TENSOR_STYLES)


MOE_FIELDS = FIELDS | EXPERT_FIELDS | {"ffn_dim": "moe_intermediate_size"}
SUPPORTED = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def names(config: Qwen3MoeConfig) -> dict[str, str | tuple[str, ...]]:
    return names_with_experts(config, qwen3.BLOCK_NAMES)


def config_json(config: Qwen3MoeConfig) -> dict[str, Any]:
    """Fields of config.json. No layer has the intermediate_size, the width of layers without experts."""
    return (
        qwen3.config_json(config)
        | {theirs: getattr(config, ours) for ours, theirs in MOE_FIELDS.items()}
        | {"intermediate_size": config.ffn_dim * config.n_active_experts}
        | SUPPORTED
    )


def config_from_json(fields: Mapping[str, Any]) -> Qwen3MoeConfig:
    """Hyper-parameters in config.json. Raises UserError if a field is missing, invalid or not supported."""
    refuse_other(fields, SUPPORTED)
    if fields.get("norm_topk_prob") is None:  # its default in transformers is the other value
        read_field(fields, "norm_topk_prob", bool)
    config = Qwen3MoeConfig(
        **qwen3.values_from_json({"intermediate_size": 1} | dict(fields))
        | expert_values(fields, Qwen3MoeConfig.balance_loss)
        | {"ffn_dim": read_field(fields, "moe_intermediate_size", int)}
    )
    refuse_invalid(qwen3.check(config, 1, 1, 1), MOE_FIELDS | SCALING_FIELDS)
    return config


QWEN3_MOE = Family(
    name="qwen3_moe",
    config_type=Qwen3MoeConfig,
    flavors=FLAVORS,
    check=qwen3.check,
    build=Qwen3Moe,
    plan=plan,
    init=init,
    flops_per_token=flops_per_token,
    hugging_face=HuggingFace("qwen3_moe", "Qwen3MoeForCausalLM", names, config_json, config_from_json),
    needs=NEEDS,
)
