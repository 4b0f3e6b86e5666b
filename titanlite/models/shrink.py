"""Tiny models of the same kind as a large one."""

import math
from dataclasses import replace
from typing import Any

TINY_HEAD_DIM = 8
TINY_WIDTHS = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6}
TINY_WIDTHS |= {"linear_key_dim": 6, "linear_value_dim": 8}
"""Largest widths of latent and of linear attention."""


def shrink_model(config: Any, ranks: int) -> Any:
    """Hyper-parameters of a tiny decoder of the same kind.

    Every divisor of `ranks` that divides a size of `config` also divides the same size of the result.
    Two pipeline stages per rank still have more than one unit each, if they do in `config`. Several query heads per
    key/value head shrink to two. If the family has a head_dim, dim is independent of it. The vocabulary stays.
    """
    n_kv_heads = math.gcd(config.n_kv_heads, ranks)
    n_heads = n_kv_heads * min(config.n_heads // config.n_kv_heads, 2)
    counts = {"n_layers": min(config.n_layers, 2 * ranks), "n_heads": n_heads, "n_kv_heads": n_kv_heads}
    head_dim = min(config.head_dim, TINY_HEAD_DIM)
    dim = n_heads * head_dim
    if "head_dim" in vars(config):
        dim = size_alike(config.dim, 3 * head_dim, ranks)
        counts["head_dim"] = head_dim
    own = vars(config)
    counts |= {name: min(own[name], width) for name, width in TINY_WIDTHS.items() if name in own}
    if "dense_ffn_dim" in own:
        counts["n_dense_layers"] = min(config.n_dense_layers, counts["n_layers"] // 2)
        counts["dense_ffn_dim"] = size_alike(config.dense_ffn_dim, 2 * dim, ranks)
    if key_heads := own.get("linear_key_heads"):
        counts["full_interval"] = min(config.full_interval, counts["n_layers"])
        counts["linear_key_heads"] = math.gcd(key_heads, ranks)
        shared = min(config.linear_value_heads // key_heads, 2)
        counts["linear_value_heads"] = counts["linear_key_heads"] * shared
    return replace(config, **counts, dim=dim, ffn_dim=size_alike(config.ffn_dim, 2 * dim, ranks))


def size_alike(size: int, target: int, ranks: int, limit: int = 0) -> int:
    """The smallest number >= `target` with the same greatest common divisor with `ranks` as `size`; at most `size`, or
    `limit` if that is larger."""
    shared, limit = math.gcd(size, ranks), max(size, limit)
    return next((number for number in range(target, limit) if math.gcd(number, ranks) == shared), size)
