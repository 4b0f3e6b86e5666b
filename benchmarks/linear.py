"""A layer of gated linear attention over sequence lengths, beside the same layer of transformers without its kernels.

One thread, one row; forward and backward of the module of Qwen3.5 with projections, convolution and gates, and the same
weights. Every case runs in a process of its own; of two passes in each round, the faster one counts. The peak is that
of the resident memory over the memory before the first pass. Ratios are to transformers in the same round.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.measuring import layer_costs, report, rows_by_length
from titanlite.models.hugging_face import stored_tensors
from titanlite.models.linear_attention import GatedDeltaNet
from titanlite.models.qwen3_5 import FLAVORS, linear_names, names_of_block

CASES = ("transformers", "titanlite")
CONFIG = replace(
    FLAVORS["debug"], dim=512, linear_key_heads=4, linear_value_heads=8, linear_key_dim=128, linear_value_dim=128
)


def layer(case: str, dtype: torch.dtype) -> nn.Module:
    """With random weights, the same in both forms."""
    widths = (CONFIG.linear_key_dim, CONFIG.linear_value_dim, CONFIG.linear_taps)
    own = GatedDeltaNet(CONFIG.dim, CONFIG.linear_key_heads, CONFIG.linear_value_heads, *widths, CONFIG.norm_eps)
    generator = torch.Generator().manual_seed(0)
    for parameter in own.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    if case == "titanlite":
        return own.to(dtype)
    # imported here: it takes seconds
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5 import modeling_qwen3_5

    fields: dict[str, Any] = {
        "hidden_size": CONFIG.dim,
        "linear_num_key_heads": CONFIG.linear_key_heads,
        "linear_num_value_heads": CONFIG.linear_value_heads,
    }
    library: Any = modeling_qwen3_5
    other: nn.Module = library.Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**fields), 0)
    names = {name: stored for name, stored in names_of_block(CONFIG, 0, linear_names).items() if "attention." in name}
    stored = stored_tensors({f"attention.{name}": each.detach() for name, each in own.named_parameters()}, names)
    other.load_state_dict({name.removeprefix("linear_attn."): tensor for name, tensor in stored.items()})
    return other.to(dtype)


def measure(case: str, seq_len: int, dtype: str) -> tuple[float, float]:
    module, more = layer(case, getattr(torch, dtype)), (None, None) if case == "titanlite" else ()
    return layer_costs(lambda x: module(x, *more), seq_len, CONFIG.dim, getattr(torch, dtype))


def main(
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192),
    dtype: Literal["float32", "bfloat16"] = "float32",
    rounds: int = 3,
    json: Path | None = None,
) -> None:
    """json: folder of linear.json."""
    rows = rows_by_length(measure, CASES, lengths, rounds, "transformers", dtype)
    report("linear", {f"A layer of gated linear attention, {dtype}": rows}, json)
