"""Attention with a window, capped scores and sinks, over sequence lengths.

A window by bands, against full causal attention, a boolean mask, and both forms of transformers' Mistral with its own
mask; capped scores and sinks, full and with the window, against plain operations and the eager attention of
transformers' Gemma 2 and gpt-oss.

One thread, one row; forward and backward. Every case runs in a process of its own; of two passes in each round, the
faster one counts. The peak is that of the resident memory over the memory before the first pass, which has queries,
keys, values and their gradients. Ratios are to full causal attention in the same round.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.measuring import costs, report, rows_by_length
from titanlite.models.attention import additive_mask, attend, may_see

OWN = ("", ", window", ", plain", ", transformers")
CASES = (
    *("full", "bands", "boolean mask", "transformers sdpa", "transformers eager"),
    *(f"{kind}{own}" for kind in ("capped", "sinks") for own in OWN),
)
CAP = 50.0


def attended(case: str, heads: tuple[Tensor, Tensor, Tensor], window: int, sinks: Tensor) -> Tensor:
    ids = torch.zeros(1, heads[0].shape[2], dtype=torch.int64)
    if case == "boolean mask":
        mask = may_see(ids, window=window)
        return functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
    if case.startswith("transformers"):
        return by_transformers(case.split()[1], heads, window)
    if case == "capped, transformers":
        # imported here: it takes seconds
        from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

        module: Any = SimpleNamespace(num_key_value_groups=2, head_dim=64, training=True)
        found: Tensor = eager_attention_forward(module, *heads, additive_mask(ids, heads[0].dtype), softcap=CAP)[0]
        return found
    if case == "sinks, transformers":
        from transformers.models.gpt_oss import modeling_gpt_oss

        module = SimpleNamespace(num_key_value_groups=2, training=True, sinks=sinks)
        eager: Any = modeling_gpt_oss.eager_attention_forward
        of_heads: Tensor = eager(module, *heads, additive_mask(ids, heads[0].dtype), 0.125)[0]
        return of_heads
    if case.endswith("plain"):
        queries, keys, values = heads[0], *(x.repeat_interleave(2, dim=1) for x in heads[1:])
        scores = queries @ keys.mT / 8
        if case.startswith("capped"):
            return (CAP * torch.tanh(scores / CAP)).masked_fill(~may_see(ids), -torch.inf).softmax(-1) @ values
        column = sinks.view(-1, 1, 1).expand(1, -1, scores.shape[2], 1)
        return torch.cat((scores.masked_fill(~may_see(ids), -torch.inf), column), -1).softmax(-1)[..., :-1] @ values
    kinds: dict[str, dict[str, Any]] = {"capped": {"cap": CAP}, "sinks": {"sinks": sinks}}
    options = kinds.get(case.partition(",")[0], {})
    return attend(*heads, None, window if "window" in case or case == "bands" else 0, **options)


def by_transformers(kind: str, heads: tuple[Tensor, Tensor, Tensor], window: int) -> Tensor:
    """Attention as Mistral's module computes it between its projections, with its mask. kind: "sdpa" or "eager"."""
    from transformers import MistralConfig
    from transformers.masking_utils import create_sliding_window_causal_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.mistral.modeling_mistral import eager_attention_forward

    config = MistralConfig(sliding_window=window)
    config._attn_implementation = kind
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True, training=True)
    mask = create_sliding_window_causal_mask(config, torch.empty(1, heads[0].shape[2], 1), None, None)
    function: Any = ALL_ATTENTION_FUNCTIONS.get_interface(kind, eager_attention_forward)
    found: Tensor = function(module, *heads, mask, scaling=64**-0.5, sliding_window=window)[0]
    return found


def measure(case: str, seq_len: int, window: int) -> tuple[float, float]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, n, seq_len, 64, generator=generator).requires_grad_() for n in (8, 4, 4))
    sinks = torch.randn(8, generator=generator).requires_grad_()
    query.grad, key.grad, value.grad = (torch.zeros_like(x) for x in (query, key, value))
    return costs(lambda: attended(case, (query, key, value), window, sinks))


def main(
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192), window: int = 512, rounds: int = 3, json: Path | None = None
) -> None:
    """json: folder of windows.json."""
    rows = rows_by_length(measure, CASES, lengths, rounds, CASES[0], window)
    report("windows", {f"Attention with a window of {window}": rows}, json)
