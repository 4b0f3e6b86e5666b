"""Qwen3-Next (Qwen Team, 2025): the model of Qwen3.5 with experts, whose folders have other tensors."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from titanlite.models.family import StoredName
from titanlite.models.qwen3_5 import MOE_FLAVORS, MOE_FORMAT, QWEN3_5_MOE, Qwen35MoeConfig, names_of_block, parts


@dataclass(frozen=True)
class Qwen3NextConfig(Qwen35MoeConfig):
    """Hyper-parameters of the qwen3_next family. Each may be given in [model] and overrides the flavor's value."""

    n_experts: int = 512
    n_active_experts: int = 10


FLAVORS = {
    "debug": Qwen3NextConfig(**vars(MOE_FLAVORS["debug"])),
    "80B-A3B": Qwen3NextConfig(2048, 48, 16, 2, 512, 151_936),
}
"""The published size, without its layer that predicts a further token, and a debug size for a laptop."""


def linear_names(config: Any) -> dict[str, StoredName]:
    """Qwen3-Next stores the projections of each head of keys, and of its heads of values, one after the other."""
    groups, keys = config.linear_key_heads, config.linear_key_dim
    heads = config.linear_value_heads // groups
    wide = parts("in_proj_qkvz.weight", groups, [keys, keys, *[heads * config.linear_value_dim] * 2])
    narrow = parts("in_proj_ba.weight", groups, [heads, heads])
    return dict(zip(("wq", "wk", "wv", "wg", "wb", "wa"), [*wide, *narrow], strict=True))


FORMAT = replace(
    MOE_FORMAT,
    config_type=Qwen3NextConfig,
    fields=MOE_FORMAT.fields | {"n_further_tokens": "num_nextn_predict_layers"},
    block=partial(names_of_block, linear=linear_names),
    supported=MOE_FORMAT.supported | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    # the width of layers without experts, which no layer has
    written=lambda config: MOE_FORMAT.written(config) | {"intermediate_size": config.ffn_dim * config.n_active_experts},
)

QWEN3_NEXT = replace(
    QWEN3_5_MOE,
    name="qwen3_next",
    config_type=Qwen3NextConfig,
    flavors=FLAVORS,
    hugging_face=FORMAT.hugging_face("qwen3_next", "Qwen3NextForCausalLM"),
)
