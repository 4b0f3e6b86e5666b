"""Attention within documents: one interface, and the kernels behind it. Plain torch."""

import os
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, create_mask, flex_attention

from titanlite.models.capped_attention import capped_attention, largest_scores
from titanlite.runtime.torch_internals import (
    REGION_AS_OPERATION,
    attention_on_cpu,
    attention_on_cpu_backward,
    fused_attention_choice,
    is_in_backward,
    set_attention_kernels,
    set_compiler,
)

MaskForm = Literal["scores", "blocks"]
"""scores: one additive number per query and key; blocks: the 128 x 128 blocks of scores to compute."""
AttentionMask = Tensor | BlockMask
"""A mask in the form that the kernel of `attend` takes: see `attention_mask`."""
VARIANTS = 64
"""Compiled versions of one function in a process: for each shape, dtype and kind of mask. Beyond its limit, torch calls
the function itself, in which FlexAttention materializes all scores."""
Kernel = Callable[..., Tensor]
"""`attend`, or a function of a family in its place. An Attention without a window, sinks or a cap calls it without
them."""


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
    document_ids: Tensor | None, dtype: torch.dtype, head_dim: int, queries: Tensor | None = None, window: int = 0
) -> AttentionMask | None:
    """Build the mask that keeps `attend` within documents; None (causal) if `document_ids` is None.

    Build it once per forward pass and window, for all blocks. document_ids: int64 (batch, seq_len), equal for positions
    of the same document. dtype, head_dim: of the queries. queries: int64 (number of queries,), their positions in the
    row; None: all. window: see `attend`. Does not synchronize with the device.
    """
    if document_ids is None:
        return None
    if mask_form(document_ids.device.type, dtype, head_dim) == "blocks":
        return block_mask(document_ids, queries, window)
    wide = attention_dtype(document_ids.device.type, dtype)
    if queries is None and 0 < window < document_ids.shape[1]:
        return band_mask(document_ids, wide, window)
    return additive_mask(document_ids, wide, queries, window)


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


def may_see(document_ids: Tensor, queries: Tensor | None = None, window: int = 0) -> Tensor:
    """Boolean mask: a query sees the keys of its own document up to its own position, of a window only the last ones.

    document_ids, queries, window: see `attention_mask`. Returns bool (batch, 1, queries, seq_len).
    """
    keys = torch.arange(document_ids.shape[1], device=document_ids.device)
    queries = keys if queries is None else queries
    same = document_ids[:, queries].unsqueeze(2) == document_ids.unsqueeze(1)
    distance = queries.unsqueeze(1) - keys
    same.logical_and_(distance >= 0)
    return (same.logical_and_(distance < window) if window else same).unsqueeze(1)


def additive_mask(document_ids: Tensor, dtype: torch.dtype, queries: Tensor | None = None, window: int = 0) -> Tensor:
    """`may_see` as an additive mask of 0 and -inf: (batch, 1, queries, seq_len) in `dtype`.

    From a boolean mask, torch would build this tensor in each block again, and save it for the backward pass.
    """
    return _additive(may_see(document_ids, queries, window), dtype)


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)


def band_mask(document_ids: Tensor, dtype: torch.dtype, window: int) -> Tensor:
    """`additive_mask` of all queries by bands, see `attend_in_bands`: (batch, bands, 1, window, 2 window)."""
    missing = -document_ids.shape[1] % window
    queries = functional.pad(document_ids, (0, missing), value=-1).unflatten(1, (-1, window))
    keys = _with_previous(queries.unsqueeze(-1), 1).squeeze(-1)  # of the first band: no document, 0
    keys[:, 0, :window] = -2
    same = queries.unsqueeze(3) == keys.unsqueeze(2)
    return _additive((same & _band(window, document_ids.device)).unsqueeze(2), dtype)


def _band(window: int, device: torch.device) -> Tensor:
    """Which keys of its band and of the band before a query sees: bool (window, 2 window)."""
    places = torch.arange(2 * window, device=device)
    distance = places[:window].unsqueeze(1) + window - places
    return (distance >= 0) & (distance < window)


def _with_previous(x: Tensor, dim: int) -> Tensor:
    """Bands of positions with the positions of the band before in front, zeros for the first one. dim: of the bands,
    which is before that of the positions."""
    previous = torch.cat((torch.zeros_like(x.narrow(dim, 0, 1)), x.narrow(dim, 0, x.shape[dim] - 1)), dim)
    return torch.cat((previous, x), dim + 1)


def block_mask(document_ids: Tensor, queries: Tensor | None = None, window: int = 0) -> BlockMask:
    """`may_see` for FlexAttention: a function, and the 128 x 128 blocks of scores that are partly or fully visible.

    Compiled, since eager mode would materialize the mask of all scores at once.
    """
    rows, seq_len = document_ids.shape

    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = query if queries is None else queries[query]
        seen = (position >= key) & (document_ids[row, position] == document_ids[row, key])
        return seen & (position - key < window) if window else seen

    built: BlockMask = compiled(create_block_mask)(
        visible, rows, None, seq_len if queries is None else len(queries), seq_len, device=document_ids.device
    )
    return built


def compiled(function: Callable[..., Any], *, as_operation: bool = False) -> Callable[..., Any]:
    """Compile `function`, once per VARIANTS of its arguments. On first use, since importing torch's compiler takes
    seconds. as_operation: whether selective recomputation sees each call as one operation, and can save its results."""
    set_compiler(recompile_limit=VARIANTS)
    return _compiled_as_operation(function) if as_operation else _compiled(function)


_compiled = cache(partial(torch.compile, dynamic=False))
_compiled_as_operation = cache(partial(torch.compile, dynamic=False, options=REGION_AS_OPERATION))


def causal_blocks(seq_len: int, window: int, device: torch.device) -> BlockMask:
    """The `block_mask` of rows that are one document."""
    # Dynamo warns about a cache that it meets.
    if torch.compiler.is_compiling():
        return _causal_blocks(seq_len, window, device)
    # A tensor that is built in inference mode cannot be saved for a backward pass.
    return _kept_causal_blocks(seq_len, window, device, torch.is_inference_mode_enabled())


def _causal_blocks(seq_len: int, window: int, device: torch.device, _is_inference: bool = False) -> BlockMask:
    def visible(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        return seen & (query - key < window) if window else seen

    build: Any = create_block_mask if torch.compiler.is_compiling() else compiled(create_block_mask)
    built: BlockMask = build(visible, None, None, seq_len, seq_len, device=device)
    return built


_kept_causal_blocks = lru_cache(maxsize=8)(_causal_blocks)
"""For all layers with this window, in all steps; of training and of inference."""


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: AttentionMask | None,
    window: int = 0,
    sinks: Tensor | None = None,
    cap: float = 0.0,
    largest: Tensor | None = None,
) -> Tensor:
    """softmax(queries keys^T / sqrt(head_dim) + mask) values; mask None: causal.

    All tensors are (batch, heads, seq_len, head_dim), the result as the queries. Keys and values may have fewer heads
    than the queries (grouped-query attention); values may be narrower, and the result then is. window: number of
    positions that a query sees, its own included; 0: all up to its own. A mask was built with the same window. sinks:
    (heads,), a further score of each query in the softmax, whose value is 0 (Xiao et al., "Efficient Streaming Language
    Models with Attention Sinks", 2023); None: no sinks.
    cap: scores s are cap * tanh(s / cap), before the mask; 0: they are not capped. Not with sinks. largest: (heads,),
    raised to the largest score of each head, sinks left out; None: scores are not noted.
    """
    if largest is not None:
        note_scores(queries, keys, mask, window, largest)
    dtype, wide = queries.dtype, attention_dtype(queries.device.type, queries.dtype)
    if wide != dtype:
        sinks = None if sinks is None else sinks.to(wide)
        return attend(queries.to(wide), keys.to(wide), values.to(wide), mask, window, sinks, cap).to(dtype)
    is_windowed = 0 < window < keys.shape[2]
    needs_blocks = (sinks is not None or cap > 0 or is_windowed) and mask is None
    if needs_blocks and mask_form(queries.device.type, dtype, queries.shape[-1]) == "blocks":
        # The kernel that returns the logsumexp, caps scores, and takes windows: for a mask of scores and grouped heads,
        # scaled_dot_product_attention often has only a plain one, which saves all weights.
        mask = causal_blocks(queries.shape[2], window, queries.device)
    if cap and not isinstance(mask, BlockMask):
        assert sinks is None, "capped scores with sinks"
        capped: Tensor = capped_attention(queries, keys, values, mask, window, cap)[0]
        return capped
    if is_windowed and (mask is None or (isinstance(mask, Tensor) and mask.ndim == 5)):
        return attend_in_bands(queries, keys, values, mask, window, sinks)
    if isinstance(mask, BlockMask):
        return _attend_in_blocks(queries, keys, values, mask, sinks, cap)
    return attend_to_scores(queries, keys, values, mask, is_causal=mask is None, sinks=sinks)


def note_scores(queries: Tensor, keys: Tensor, mask: AttentionMask | None, window: int, largest: Tensor) -> None:
    """Raise `largest`, (heads,), to the largest score of each head; not in recomputations. See `attend`."""
    queries, keys = queries.detach(), keys.detach()
    if isinstance(mask, BlockMask):
        largest.copy_(torch.maximum(largest, largest_scores(queries, keys, mask, window, largest.dtype)))
    else:
        _note_scores(queries, keys, mask, window, largest)


@torch.library.custom_op("titanlite::note_scores", mutates_args=("largest",))
def _note_scores(queries: Tensor, keys: Tensor, mask: Tensor | None, window: int, largest: Tensor) -> None:
    """An operation, so that compiled blocks do not trace its loop."""
    if not is_in_backward():
        largest.copy_(torch.maximum(largest, largest_scores(queries, keys, mask, window, largest.dtype)))


def _attend_in_blocks(
    queries: Tensor, keys: Tensor, values: Tensor, mask: BlockMask, sinks: Tensor | None, cap: float
) -> Tensor:
    # A compiled block traces the function itself: Dynamo warns about a cache that it meets.
    function: Any = flex_attention if torch.compiler.is_compiling() else compiled(flex_attention, as_operation=True)
    change = partial(_capped, cap=cap) if cap else None
    attend_to: Any = partial(function, score_mod=change, block_mask=mask, **_grouping(queries, keys))
    out: Tensor
    if sinks is None:
        out = attend_to(queries, keys, values)
        return out
    out, aux = attend_to(queries, keys, values, return_aux=AuxRequest(lse=True))
    shares: Tensor = (aux.lse - sinks.unsqueeze(1)).sigmoid()
    return out * shares.unsqueeze(-1).to(out.dtype)


def _grouping(queries: Tensor, keys: Tensor) -> dict[str, bool]:
    """The argument of torch's kernels for grouped heads. Decided here: in a compiled graph of several shapes, the
    comparison itself is a symbol, which they do not take."""
    return {"enable_gqa": True} if queries.shape[1] != keys.shape[1] else {}


def _capped(score: Tensor, *_indexes: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(score / cap)


def attend_to_scores(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """torch's scaled_dot_product_attention with heads of keys that several heads of queries share, and with `sinks`:
    see `attend`. Values may be narrower than keys: they are padded, since the fast kernels take only equal widths."""
    out: Tensor
    if (missing := keys.shape[-1] - values.shape[-1]) > 0:
        padded = functional.pad(values, (0, missing))
        out = attend_to_scores(queries, keys, padded, mask, is_causal=is_causal, sinks=sinks)
        return out[..., :-missing]
    if sinks is None:
        out = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=is_causal, **_grouping(queries, keys)
        )
    elif queries.device.type == "cuda":  # generation, and dtypes and widths that FlexAttention does not support
        weights = _weights(_scores(queries, keys, mask), sinks).to(values.dtype)
        out = weights @ values.repeat_interleave(queries.shape[1] // values.shape[1], dim=1)
    else:
        out = _WithSinks.apply(queries, keys, values, mask, is_causal, sinks)  # type: ignore[no-untyped-call]
    return out


class _WithSinks(torch.autograd.Function):
    """The CPU kernel of scaled_dot_product_attention. With a sink, the sum of the exponentials of a query's scores is
    larger, so its result is smaller. The backward kernel takes both from the forward pass, and the sink's gradient is
    that of a score whose value is 0."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, is_causal: bool, sinks: Tensor
    ) -> Tensor:
        alone, logsumexp = attention_on_cpu(queries, keys, values, mask, is_causal=is_causal)
        total = torch.logaddexp(logsumexp, sinks.unsqueeze(1).to(logsumexp.dtype))
        out = (alone * (logsumexp - total).exp().unsqueeze(-1)).to(alone.dtype)
        ctx.save_for_backward(queries, keys, values, mask, sinks, out, total)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, mask, sinks, out, total = ctx.saved_tensors
        of_heads = attention_on_cpu_backward(gradient, queries, keys, values, out, total, mask, is_causal=ctx.is_causal)
        weights = (sinks.unsqueeze(1) - total).exp()
        return *of_heads, None, None, -(weights * (gradient * out).sum(-1)).sum((0, 2))


def _of_entire_rows(mask: Tensor, seq_len: int) -> Tensor:
    """The `additive_mask` of a `band_mask`."""
    rows, bands, _, window, _ = mask.shape
    full = mask.new_full((rows, bands, window, (bands + 1) * window), -torch.inf)
    for band in range(bands):
        full[:, band, :, band * window : (band + 2) * window] = mask[:, band, 0]
    return full.flatten(1, 2)[:, None, :seq_len, window : window + seq_len]


def attend_in_bands(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, window: int, sinks: Tensor | None = None
) -> Tensor:
    """`attend` with a window, in time and memory of seq_len x window: each band of `window` queries sees the keys of
    its own band and of the one before. mask: see `band_mask`."""
    rows, _, seq_len, _ = queries.shape
    missing = -seq_len % window

    def bands(x: Tensor) -> Tensor:
        padded = functional.pad(x, (0, 0, 0, missing)) if missing else x  # a pad of nothing would be a copy
        out: Tensor = padded.unflatten(2, (-1, window))
        return out

    def batched(x: Tensor) -> Tensor:
        """(batch, heads, bands, positions, head_dim) -> (batch x bands, heads, positions, head_dim)."""
        return x.transpose(1, 2).flatten(0, 1)

    def joined(x: Tensor) -> Tensor:
        out: Tensor = x.unflatten(0, (rows, -1))
        return out.transpose(1, 2).flatten(2, 3)

    kernel = partial(attend_to_scores, sinks=sinks)
    queries, keys, values = (bands(x) for x in (queries, keys, values))
    if mask is not None:
        keys, values = (batched(_with_previous(x, 2)) for x in (keys, values))
        return joined(kernel(batched(queries), keys, values, mask.flatten(0, 1)))[:, :, :seq_len]
    first = kernel(queries[:, :, 0], keys[:, :, 0], values[:, :, 0], is_causal=True)
    band = _additive(_band(window, queries.device), queries.dtype)
    keys, values = (batched(torch.cat((x[:, :, :-1], x[:, :, 1:]), dim=3)) for x in (keys, values))
    others = kernel(batched(queries[:, :, 1:]), keys, values, band)
    return torch.cat((first, joined(others)), dim=2)[:, :, :seq_len]


@torch.no_grad()
def attention_weights(
    queries: Tensor,
    keys: Tensor,
    mask: AttentionMask | None,
    window: int = 0,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """softmax(queries keys^T / sqrt(head_dim) + mask), (batch, heads, queries, seq_len), in at least float32.

    For `titanlite.watch`: without gradients, and large. Arguments: see `attend`. Without the weights of sinks.
    """
    wide = torch.promote_types(queries.dtype, torch.float32)
    return _weights(_scores(queries.to(wide), keys.to(wide), mask, window, cap), sinks)


def _scores(queries: Tensor, keys: Tensor, mask: AttentionMask | None, window: int = 0, cap: float = 0.0) -> Tensor:
    """queries keys^T / sqrt(head_dim), capped, + mask. mask None: causal, with the queries at the last positions."""
    scores: Tensor = queries @ keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1).mT
    scores = scores / queries.shape[-1] ** 0.5
    scores = _capped(scores, cap=cap) if cap else scores
    n_queries, seq_len = scores.shape[-2:]
    if isinstance(mask, Tensor):
        return scores + (_of_entire_rows(mask, seq_len) if mask.ndim == 5 else mask)
    if mask is None:
        earlier = seq_len - n_queries
        seen = torch.ones(n_queries, seq_len, dtype=torch.bool, device=scores.device).tril(earlier)
        seen = seen.triu(earlier + 1 - window) if window else seen
    else:
        seen = create_mask(mask.mask_mod, len(scores), 1, n_queries, seq_len, device=str(scores.device))
    return scores.masked_fill(~seen, -torch.inf)


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return scores.softmax(-1)
    total = torch.logaddexp(scores.logsumexp(-1), sinks.unsqueeze(1).to(scores.dtype))
    return (scores - total.unsqueeze(-1)).exp()
