"""A layer of latent attention over sequence lengths, beside both forms of transformers' layer.

One thread, one row; forward and backward of the module of DeepSeek-V3 with projections, norms and rotation, and the
same weights. Every case runs in a process of its own; of two passes in each round, the faster one counts. The peak is
that of the resident memory over the memory before the first pass. Ratios are to the first form,
sdpa, in the same round.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.measuring import layer_costs, report, rows_by_length
from titanlite.models.deepseek_v3 import FLAVORS, FORMAT, attention
from titanlite.models.hugging_face import stored_tensors
from titanlite.models.layers import RotaryEmbedding

CASES = ("transformers", "transformers eager", "titanlite")
CONFIG = replace(
    FLAVORS["debug"],
    dim=512,
    n_heads=8,
    n_kv_heads=8,
    q_lora_rank=192,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    max_seq_len=8192,
)


def passes(case: str, seq_len: int, dtype: torch.dtype) -> Any:
    """A function that computes the layer's output; of the same weights in all forms."""
    own = attention(CONFIG, 1.0)
    generator = torch.Generator().manual_seed(0)
    for parameter in own.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    positions = torch.arange(seq_len).unsqueeze(0)
    if case == "titanlite":
        rope = RotaryEmbedding(CONFIG.rotary_dim, CONFIG.max_seq_len, CONFIG.rope_theta, None)
        rope.init_buffers(torch.device("cpu"), torch.float32)
        module, tables = own.to(dtype), rope(positions)
        return lambda x: module(x, tables, None)
    # imported here: it takes seconds
    from transformers import DeepseekV3Config
    from transformers.masking_utils import create_causal_mask
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    library: Any = modeling_deepseek_v3
    config = DeepseekV3Config(**FORMAT.config_json(CONFIG))
    config._attn_implementation = "eager" if case.endswith("eager") else "sdpa"
    other = library.DeepseekV3Attention(config, 0)
    names = {name: stored for name, stored in FORMAT.block(CONFIG, 0).items() if "attention." in name}  # type: ignore[misc]
    stored = stored_tensors({f"attention.{name}": each.detach() for name, each in own.named_parameters()}, names)
    other.load_state_dict({name.removeprefix("self_attn."): tensor for name, tensor in stored.items()})
    other.to(dtype)
    angles = library.DeepseekV3RotaryEmbedding(config)(torch.empty(1, dtype=dtype), positions)

    def forward(x: Tensor) -> Tensor:
        found: Tensor = other(x, angles, create_causal_mask(config, x, None, None))[0]
        return found

    return forward


def measure(case: str, seq_len: int, dtype: str) -> tuple[float, float]:
    return layer_costs(passes(case, seq_len, getattr(torch, dtype)), seq_len, CONFIG.dim, getattr(torch, dtype))


def main(
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192),
    dtype: Literal["float32", "bfloat16"] = "float32",
    rounds: int = 3,
    json: Path | None = None,
) -> None:
    """json: folder of latent.json."""
    rows = rows_by_length(measure, CASES, lengths, rounds, "transformers", dtype)
    report("latent", {f"A layer of latent attention, {dtype}": rows}, json)
