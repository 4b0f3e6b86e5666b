"""Qwen3-MoE (Qwen Team, "Qwen3 Technical Report", 2025): Qwen3 with a mixture of experts in every block."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from titanlite.models import qwen3
from titanlite.models.decoder import Block, ExpertHyperParameters, decoder_family
from titanlite.models.experts import MixtureOfExperts
from titanlite.models.hugging_face import with_head_dim, without_unused_window
from titanlite.models.qwen3 import NEEDS, Qwen3, Qwen3Config, attention


@dataclass(frozen=True)
class Qwen3MoeConfig(ExpertHyperParameters, Qwen3Config):
    """Hyper-parameters of the qwen3_moe family. Each may be given in [model] and overrides the flavor's value."""


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
        super().__init__(config, lambda _: Block(config, attention(config), MixtureOfExperts(config)))


def _prepared(fields: Mapping[str, Any]) -> dict[str, Any]:
    """transformers does not read layer_types or max_window_layers: any window is that of all layers."""
    windows = without_unused_window({**fields, "layer_types": None, "max_window_layers": 0})
    return {**with_head_dim(windows), "layer_types": fields.get("layer_types")}


FORMAT = replace(
    qwen3.FORMAT,
    config_type=Qwen3MoeConfig,
    fields={"ffn_dim": "moe_intermediate_size"},
    supported={**qwen3.FORMAT.supported, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    required=("norm_topk_prob",),
    prepared=_prepared,
    # the width of layers without experts, which no layer has
    written=lambda config: {"intermediate_size": config.ffn_dim * config.n_active_experts},
)

QWEN3_MOE = decoder_family(
    "qwen3_moe", FLAVORS, qwen3.check, Qwen3Moe, FORMAT.hugging_face("qwen3_moe", "Qwen3MoeForCausalLM"), needs=NEEDS
)
