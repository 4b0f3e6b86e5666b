"""Capped attention, and the largest scores, by blocks of queries: torch's fused kernels do neither.

Two operations of torch's library, forward and backward: compiled blocks do not trace their loops, and recomputation can
save the result. On a GPU, models/attention.py caps scores in FlexAttention.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 64
"""Queries whose scores exist at the same time, of all heads."""


@torch.library.custom_op("titanlite::capped_attention", mutates_args=())
def capped_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, window: int, cap: float
) -> tuple[Tensor, Tensor]:
    """softmax(cap * tanh(queries keys^T / sqrt(head_dim) / cap) + mask) values, and the logsumexp of each query.

    Arguments: as of `attend` in models/attention.py. mask: additive, of all keys or of bands; None: the queries are the
    last positions, causal. The second result is (batch, heads, queries, 1).
    """
    factor = queries.shape[-1] ** -0.5 / cap
    out, logsumexp = torch.empty_like(queries), queries.new_empty(*queries.shape[:3], 1)
    for rows, columns, part in _blocks(queries, keys.shape[2], mask, window):
        seen = keys[:, :, columns]
        scores = _scores(_by_key_head(queries[:, :, rows], seen) * factor, seen, part, cap)[0]
        top = scores.amax(-1, keepdim=True)
        total = scores.sub_(top).exp_().sum(-1, keepdim=True)
        out[:, :, rows] = _by_head(scores @ values[:, :, columns] / total, queries)
        logsumexp[:, :, rows] = _by_head(total.log_().add_(top), queries)
    return out, logsumexp


@capped_attention.register_fake
def _(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, window: int, cap: float
) -> tuple[Tensor, Tensor]:
    del keys, values, mask, window, cap
    return torch.empty_like(queries), queries.new_empty(*queries.shape[:3], 1)


@torch.library.custom_op("titanlite::capped_attention_backward", mutates_args=())
def capped_attention_backward(
    gradient: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    window: int,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values. It computes the scores again.

    With weights p, capped scores cap * t and g = gradient values^T, the gradient of a score is p * (g - sum(p * g)) *
    (1 - t^2), where the sum is that of gradient * out.
    """
    factor = queries.shape[-1] ** -0.5 / cap
    found = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
    of_queries, of_keys, of_values = found
    for rows, columns, part in _blocks(queries, keys.shape[2], mask, window):
        seen = keys[:, :, columns]
        scaled, above, mean, sums = (
            _by_key_head(x, seen)
            for x in (
                queries[:, :, rows] * factor,
                gradient[:, :, rows],
                (gradient[:, :, rows] * out[:, :, rows]).sum(-1, keepdim=True),
                logsumexp[:, :, rows],
            )
        )
        scores, tanh = _scores(scaled, seen, part, cap)
        weights = scores.sub_(sums).exp_()
        of_values[:, :, columns] += weights.mT @ above
        of_scores = (above @ values[:, :, columns].mT).sub_(mean).mul_(weights)
        of_scores.mul_(tanh.square_().neg_().add_(1.0)).mul_(cap)
        of_queries[:, :, rows] = _by_head(of_scores @ seen, queries) * factor
        of_keys[:, :, columns] += of_scores.mT @ scaled
    return found


@capped_attention_backward.register_fake
def _(
    gradient: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    window: int,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    del gradient, mask, out, logsumexp, window, cap
    return torch.empty_like(queries), torch.empty_like(keys), torch.empty_like(values)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.cap = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, gradient: Tensor, _of_logsumexp: Tensor) -> tuple[Tensor | None, ...]:
    of_inputs = capped_attention_backward(gradient, *ctx.saved_tensors, ctx.window, ctx.cap)
    return *of_inputs, None, None, None


capped_attention.register_autograd(_differentiate, setup_context=_save)


def _blocks(
    queries: Tensor, n_keys: int, mask: Tensor | None, window: int, size: int = BLOCK
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Blocks of at most `size` queries: their slice, that of the keys that they may see, and the additive mask of both,
    of shape (batch or 1, 1, queries, keys)."""
    n_queries, of_bands = queries.shape[2], mask is not None and mask.ndim == 5
    ahead, band = (n_keys - n_queries if mask is None else 0), window if of_bands else n_queries
    for start in range(0, n_queries, band):
        end = min(start + band, n_queries)
        for begin in range(start, end, size):
            rows = slice(begin, min(begin + size, end))
            if mask is not None and not of_bands:
                yield rows, slice(0, n_keys), mask[:, :, rows]
                continue
            columns = slice(max(ahead + begin - window + 1, 0) if window else 0, ahead + rows.stop)
            if mask is None:
                places = torch.arange(columns.start, columns.stop, device=queries.device)
                distance = places[ahead + begin - columns.start :].unsqueeze(1) - places
                hidden = (distance < 0) | (distance >= (window or n_keys))
                part = torch.zeros_like(hidden, dtype=queries.dtype).masked_fill_(hidden, -torch.inf)[None, None]
            else:
                first = start - band  # of the keys of this band
                part = mask[:, start // band, :, begin - start : rows.stop - start]
                part = part[..., columns.start - first : columns.stop - first]
            yield rows, columns, part


def _scores(scaled: Tensor, keys: Tensor, mask: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Capped and masked scores, and their hyperbolic tangents; (batch, heads of keys, queries of their heads, keys).

    scaled: queries / sqrt(head_dim) / cap.
    """
    tanh = (scaled @ keys.mT).tanh_()
    scores = tanh * cap
    scores.unflatten(2, (-1, mask.shape[2])).add_(mask.unsqueeze(2))
    return scores, tanh


def _by_key_head(x: Tensor, keys: Tensor) -> Tensor:
    """(batch, heads, queries, n) -> (batch, heads of keys, queries of all heads that share it, n)."""
    out: Tensor = x.unflatten(1, (keys.shape[1], -1))
    return out.flatten(2, 3)


def _by_head(x: Tensor, queries: Tensor) -> Tensor:
    """The inverse of _by_key_head."""
    out: Tensor = x.unflatten(2, (queries.shape[1] // x.shape[1], -1))
    return out.flatten(1, 2)


BLOCK_SCORES = 2**24
"""Scores of a block of `largest_scores`: 64 MiB in float32."""


def largest_scores(
    queries: Tensor, keys: Tensor, mask: Tensor | BlockMask | None, window: int, dtype: torch.dtype
) -> Tensor:
    """The largest score of each head that the mask does not hide, (heads,). Other arguments: as of `attend`."""
    rows, heads, _, width = queries.shape
    size = max(BLOCK_SCORES // (rows * heads * keys.shape[2]), 1)
    if isinstance(mask, BlockMask):
        blocks = _seen_blocks(queries, keys, mask, size)
    else:
        blocks = _blocks(queries, keys.shape[2], mask, window, size)
    found = queries.new_full((heads,), -torch.inf, dtype=dtype)
    for of_queries, of_keys, part in blocks:
        seen = keys[:, :, of_keys].to(dtype)
        scores = _by_key_head(queries[:, :, of_queries].to(dtype), seen) @ seen.mT
        scores = scores.unflatten(2, (heads // keys.shape[1], -1)).add_(part.to(dtype).unsqueeze(2))
        found = torch.maximum(found, scores.amax((0, 3, 4)).flatten())
        del scores  # before those of the next block
    largest: Tensor = found * width**-0.5
    return largest


def _seen_blocks(queries: Tensor, keys: Tensor, mask: BlockMask, size: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """_blocks of a mask for FlexAttention."""
    n_rows, n_keys, device = len(queries), keys.shape[2], queries.device
    row = torch.arange(n_rows, device=device).view(-1, 1, 1)
    key = torch.arange(n_keys, device=device)
    for begin in range(0, queries.shape[2], size):
        rows = slice(begin, min(begin + size, queries.shape[2]))
        query = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
        seen = mask.mask_mod(row, torch.zeros_like(row), query, key).expand(n_rows, -1, -1)
        hidden = torch.zeros_like(seen, dtype=queries.dtype).masked_fill(~seen, -torch.inf)
        yield rows, slice(0, n_keys), hidden.unsqueeze(1)
