"""Attention within documents: one interface, and the kernels behind it. Plain torch."""

import os
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

from titanlite.runtime.torch_internals import fused_attention_choice, set_attention_kernels

MaskForm = Literal["scores", "blocks"]
"""scores: one additive number per query and key; blocks: the 128 x 128 blocks of scores to compute."""
AttentionMask = Tensor | BlockMask
"""A mask in the form that the kernel of `attend` takes: see `attention_mask`."""
Kernel = Callable[[Tensor, Tensor, Tensor, AttentionMask | None], Tensor]
"""`attend`, or a function of a family in its place."""


def pin_kernels(device: torch.device) -> None:
    """Set the order in which scaled_dot_product_attention tries its kernels on a GPU, for the process.

    Not for a part of the program: compiled blocks choose the kernel while they are traced, and recomputed blocks in the
    backward pass, on another thread.
    """
    if device.type == "cuda":
        version = torch.backends.cudnn.version() if torch.version.cuda else None  # on AMD's GPUs it is MIOpen's
        order = kernel_order(torch.cuda.get_device_capability(device)[0], version or 0)
        set_attention_kernels(order)


def kernel_order(capability: int, cudnn_version: int) -> list[SDPBackend]:
    """The kernels of scaled_dot_product_attention in the order of preference; kernels that are not in it are not used.

    cuDNN's is first on Hopper and Blackwell (compute capability 9 and 10), from cuDNN 9.15.1 on: older versions fail
    for sequence lengths that are not multiples of 128. This is the rule of torch 2.13, for all versions, and so is the
    environment variable TORCH_CUDNN_SDPA_DEPRIORITIZED.
    """
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    is_wanted = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "0") == "0"
    return (
        [SDPBackend.CUDNN_ATTENTION, *order] if is_wanted and capability in (9, 10) and cudnn_version > 91500 else order
    )


def chosen_kernel(device: torch.device, dtype: torch.dtype, n_heads: int, n_kv_heads: int, head_dim: int) -> str:
    """Name of the kernel that scaled_dot_product_attention takes for a causal training step, such as "flash"."""
    heads = (n_heads, n_kv_heads, n_kv_heads)
    shapes = [(1, number, 128, head_dim) for number in heads]
    inputs = [torch.empty(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]
    choice = fused_attention_choice(*inputs, enable_gqa=n_heads != n_kv_heads)
    return SDPBackend(choice).name.removesuffix("_ATTENTION").lower()


def document_arguments(positions: Tensor | None) -> dict[str, Tensor]:
    """Keyword arguments of a model's forward for rows that hold several documents; {} if `positions` is None.

    positions: int64 (batch, seq_len), 0 where a document begins. Computed on their device, without a host read.
    """
    return {} if positions is None else {"positions": positions, "document_ids": (positions == 0).cumsum(1)}


def attention_mask(
    document_ids: Tensor | None, dtype: torch.dtype, head_dim: int, queries: Tensor | None = None
) -> AttentionMask | None:
    """Build the mask that keeps `attend` within documents; None (causal) if `document_ids` is None.

    Build it once per forward pass, for all blocks. document_ids: int64 (batch, seq_len), equal for positions of the
    same document. dtype, head_dim: of the queries. queries: int64 (number of queries,), their positions in the row;
    None: all. Does not synchronize with the device.
    """
    if document_ids is None:
        return None
    if mask_form(document_ids.device.type, dtype, head_dim) == "blocks":
        return block_mask(document_ids, queries)
    return additive_mask(document_ids, attention_dtype(document_ids.device.type, dtype), queries)


def attention_dtype(device_type: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which `attend` computes: on CPUs at least float32, since torch's kernels in bfloat16 are slower
    there, by an order of magnitude on some CPUs (docs/LOG.md)."""
    return torch.promote_types(dtype, torch.float32) if device_type == "cpu" else dtype


def mask_form(device_type: str, dtype: torch.dtype, head_dim: int) -> MaskForm:
    """Choose the kernel: "blocks" is FlexAttention, "scores" is torch's scaled_dot_product_attention.

    FlexAttention skips fully masked blocks, but has no backward pass on the CPU, and its kernels take neither float64
    nor heads narrower than 16.
    """
    return "blocks" if device_type == "cuda" and dtype != torch.float64 and head_dim >= 16 else "scores"


def may_see(document_ids: Tensor, queries: Tensor | None = None) -> Tensor:
    """Boolean mask: a query sees the keys of its own document up to its own position.

    document_ids, queries: see `attention_mask`. Returns bool (batch, 1, queries, seq_len).
    """
    keys = torch.arange(document_ids.shape[1], device=document_ids.device)
    queries = keys if queries is None else queries
    same = document_ids[:, queries].unsqueeze(2) == document_ids.unsqueeze(1)
    return same.logical_and_(queries.unsqueeze(1) >= keys).unsqueeze(1)


def additive_mask(document_ids: Tensor, dtype: torch.dtype, queries: Tensor | None = None) -> Tensor:
    """`may_see` as an additive mask of 0 and -inf: (batch, 1, queries, seq_len) in `dtype`.

    From a boolean mask, torch would build this tensor in each block again, and save it for the backward pass.
    """
    seen = may_see(document_ids, queries)
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)


def block_mask(document_ids: Tensor, queries: Tensor | None = None) -> BlockMask:
    """`may_see` for FlexAttention: a function, and the 128 x 128 blocks of scores that are partly or fully visible.

    Compiled, since eager mode would materialize the mask of all scores at once.
    """
    rows, seq_len = document_ids.shape

    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = query if queries is None else queries[query]
        return (position >= key) & (document_ids[row, position] == document_ids[row, key])

    built: BlockMask = compiled(create_block_mask)(
        visible, rows, None, seq_len if queries is None else len(queries), seq_len, device=document_ids.device
    )
    return built


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function`, once per input shape. On first use, since importing torch's compiler takes seconds."""
    return torch.compile(function, dynamic=False)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask | None) -> Tensor:
    """softmax(queries keys^T / sqrt(head_dim) + mask) values; mask None: causal.

    All tensors are (batch, heads, seq_len, head_dim), the result as the queries. Keys and values may have fewer heads
    than the queries (grouped-query attention).
    """
    dtype, wide = queries.dtype, attention_dtype(queries.device.type, queries.dtype)
    if wide != dtype:
        return attend(queries.to(wide), keys.to(wide), values.to(wide), mask).to(dtype)
    grouped = queries.shape[1] != keys.shape[1]
    if isinstance(mask, BlockMask):
        # A compiled block traces the function itself: Dynamo warns about a cache that it meets.
        function: Any = flex_attention if torch.compiler.is_compiling() else compiled(flex_attention)
        out: Tensor = function(queries, keys, values, block_mask=mask, enable_gqa=grouped)
        return out
    return functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )


@torch.no_grad()
def attention_weights(queries: Tensor, keys: Tensor, mask: AttentionMask | None) -> Tensor:
    """softmax(queries keys^T / sqrt(head_dim) + mask), (batch, heads, queries, seq_len), in at least float32.

    For `titanlite.watch`: without gradients, and large. Arguments: see `attend`.
    """
    wide, groups = torch.promote_types(queries.dtype, torch.float32), queries.shape[1] // keys.shape[1]
    keys = keys.to(wide).repeat_interleave(groups, dim=1)
    scores: Tensor = queries.to(wide) @ keys.mT / queries.shape[-1] ** 0.5
    if isinstance(mask, Tensor):
        return (scores + mask).softmax(-1)
    n_queries, seq_len = scores.shape[-2:]
    if mask is None:
        seen = torch.ones(n_queries, seq_len, dtype=torch.bool, device=scores.device).tril()
    else:
        seen = create_mask(mask.mask_mod, len(scores), 1, n_queries, seq_len, device=str(scores.device))
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)
