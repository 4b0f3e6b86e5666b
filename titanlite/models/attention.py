"""Attention that stays inside documents: one interface, and the kernels behind it. Plain torch."""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

MaskForm = Literal["scores", "blocks"]
"""A number for each query and key, or which blocks of 128 x 128 of them to look at."""
AttentionMask = Tensor | BlockMask
"""Who may see whom, in the form that the kernel takes which `attend` then uses: see attention_mask."""


def document_arguments(positions: Tensor | None) -> dict[str, Tensor]:
    """What a model's forward takes beside tokens of rows that hold several documents; {} for None.

    positions: int64 (batch, seq_len), 0 where a document begins. Computed where they are, nothing is read back.
    """
    return {} if positions is None else {"positions": positions, "document_ids": (positions == 0).cumsum(1)}


def attention_mask(document_ids: Tensor | None, dtype: torch.dtype, head_dim: int) -> AttentionMask | None:
    """What keeps attention inside documents, for `attend`; None for None: each row is one document.

    To be built once in a forward pass, for all its blocks. document_ids: int64 (batch, seq_len), equal where two
    positions belong to one document. dtype, head_dim: of the queries. The device is asked nothing.
    """
    if document_ids is None:
        return None
    if mask_form(document_ids.device.type, dtype, head_dim) == "blocks":
        return block_mask(document_ids)
    return additive_mask(document_ids, dtype)


def mask_form(device_type: str, dtype: torch.dtype, head_dim: int) -> MaskForm:
    """The only place that chooses between kernels: "blocks" is FlexAttention, "scores" torch's own attention.

    FlexAttention skips what nobody may see, but has no backward pass on the CPU, and its kernels take neither float64
    nor heads narrower than 16.
    """
    return "blocks" if device_type == "cuda" and dtype != torch.float64 and head_dim >= 16 else "scores"


def may_see(document_ids: Tensor) -> Tensor:
    """Which keys a query may see: those of its own document that are not after it.

    document_ids: as for attention_mask. Returns bool (batch, 1, seq_len, seq_len), true where query (third dim) may see
    key (fourth dim).
    """
    same = document_ids.unsqueeze(2) == document_ids.unsqueeze(1)
    return same.tril().unsqueeze(1)


def additive_mask(document_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """`may_see` as what is added to the scores, 0 or -inf: (batch, 1, seq_len, seq_len) in `dtype`.

    Of a boolean mask torch makes this very tensor in each block, and keeps it there for the backward pass.
    """
    seen = may_see(document_ids)
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)


def block_mask(document_ids: Tensor) -> BlockMask:
    """`may_see` as FlexAttention takes it: a rule, and which blocks of 128 x 128 scores hold any, or only visible ones.

    Compiled: without that, all scores' visibility would be in memory at once.
    """
    rows, seq_len = document_ids.shape

    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document_ids[row, query] == document_ids[row, key])

    built: BlockMask = compiled(create_block_mask)(visible, rows, None, seq_len, seq_len, device=document_ids.device)
    return built


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled for each shape that it meets; inside a compiled block it becomes a part of that."""
    return torch.compile(function, dynamic=False)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask | None) -> Tensor:
    """softmax(queries keys^T / sqrt(head_dim)) values over what a query may see: None: itself and all before it.

    All (batch, heads, seq_len, head_dim), the result as the queries; several of their heads may share one of the keys'
    and values'.
    """
    grouped = queries.shape[1] != keys.shape[1]
    if isinstance(mask, BlockMask):
        out: Tensor = compiled(flex_attention)(queries, keys, values, block_mask=mask, enable_gqa=grouped)
        return out
    return functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )
