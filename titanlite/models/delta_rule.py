"""Gated delta rule (Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024), in chunks.

A head has a state S, a matrix from keys to values. Position t decays it and corrects what it returns for the key:
S = exp(g) S, then S = S + k (beta (v - S^T k))^T; its result is S^T q. Keys and queries are normalized to length 1, and
queries divided by sqrt(width). Time and memory grow linearly with the length.

A chunk of CHUNK positions is computed by matrix products (the WY form: Yang et al., "Parallelizing Linear Transformers
with the Delta Rule over Sequence Length", 2024); only states pass from chunk to chunk. At the start of a document, the
state is 0. All is computed in promote_types(dtype, float32).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from titanlite.runtime.determinism import cumulative_sum

CHUNK = 64
"""Positions of a chunk."""
SEGMENT = 16
"""Chunks that are computed at once. The forward pass saves the state before each segment, and the backward pass
computes the segment again."""
NORM_EPS = 1e-6
"""Added to the squared length of queries and keys."""


def gated_delta_rule(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    starts: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The results of all positions, (batch, seq_len, heads, value_dim), and the state after the last one, in the wide
    dtype, (batch, heads, key_dim, value_dim), which has no gradient.

    queries, keys: (batch, seq_len, key_heads, key_dim), each for heads / key_heads adjacent heads. values: (batch,
    seq_len, heads, value_dim). decays: g, at most 0; betas: (batch, seq_len, heads), in the wide dtype. starts: bool
    (batch, seq_len), whether a document starts at a position; None: at the first one only. state: before the first
    position; None: 0.
    """
    out, states = _gated_delta_rule(queries, keys, values, decays, betas, starts, state)
    return out, states[-1].unflatten(0, (len(queries), -1))


@torch.library.custom_op("titanlite::gated_delta_rule", mutates_args=())
def _gated_delta_rule(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    starts: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(results, states before each segment and after the last one): an operation, so that compiled blocks do not trace
    its loop."""
    batch, seq_len = values.shape[:2]
    wide = torch.promote_types(values.dtype, torch.float32)
    states = values.new_empty(_states_shape(keys, values), dtype=wide)
    states[0] = 0 if state is None else state.flatten(0, 1)
    out = torch.empty_like(values, memory_format=torch.contiguous_format)
    for index, part in enumerate(_segments(seq_len)):
        chunks = _chunks(queries, keys, values, decays, betas, starts, part)
        corrections, before, states[index + 1] = _scan(chunks, states[index])
        results = chunks.decayed_queries @ before + chunks.scores @ corrections
        out[:, part] = _joined(results, batch, part.stop - part.start)
    return out, states


def _states_shape(keys: Tensor, values: Tensor) -> tuple[int, ...]:
    batch, seq_len, n_heads, width = values.shape
    return -(-seq_len // (CHUNK * SEGMENT)) + 1, batch * n_heads, keys.shape[-1], width


@_gated_delta_rule.register_fake
def _(
    _queries: Tensor,
    keys: Tensor,
    values: Tensor,
    _decays: Tensor,
    _betas: Tensor,
    _starts: Tensor | None,
    _state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(values.dtype, torch.float32)
    out = torch.empty_like(values, memory_format=torch.contiguous_format)
    return out, values.new_empty(_states_shape(keys, values), dtype=wide)


class _Chunks(NamedTuple):
    """Chunks of a segment: (chunks, batch x heads, CHUNK, …) each; those of keys and queries have key_heads."""

    queries: Tensor
    """Normalized and divided, and the factors of both: (…, 1)."""
    query_factors: Tensor
    keys: Tensor
    key_factors: Tensor
    values: Tensor
    betas: Tensor
    decay: Tensor
    """From each position to each later one of its document, 0 for others: (…, CHUNK, CHUNK)."""
    from_start: Tensor
    """Decay from the state before the chunk, (…, 1)."""
    to_end: Tensor
    """Decay from each position to the state after the chunk, (…, 1)."""
    through: Tensor
    """Decay of the state, (…, 1, 1)."""
    products: Tensor
    """Of keys, below the diagonal, times beta and decay."""
    scores: Tensor
    decayed_queries: Tensor
    decayed_keys: Tensor
    solved_values: Tensor
    """Corrections of values if the state before the chunk is 0."""
    solved_keys: Tensor
    """The corrections have this times the state less."""


def _segments(seq_len: int) -> list[slice]:
    size = CHUNK * SEGMENT
    return [slice(start, min(start + size, seq_len)) for start in range(0, seq_len, size)]


def _split(x: Tensor, size: int) -> Tensor:
    """(batch, positions, heads, …) -> (chunks, batch x heads, size, …), in the wide dtype, with zeros at the end."""
    missing = -x.shape[1] % size
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if missing:
        x = functional.pad(x, (*(0, 0) * (x.dim() - 2), 0, missing))
    x = x.unflatten(1, (-1, size)).movedim(3, 1).movedim(2, 0)  # chunks, batch, heads, size, …
    return x.flatten(1, 2).contiguous()


def _joined(x: Tensor, batch: int, seq_len: int) -> Tensor:
    """The inverse of _split."""
    joined: Tensor = x.unflatten(1, (batch, -1)).movedim(0, 2).flatten(2, 3)
    return joined.transpose(1, 2)[:, :seq_len]


def _normalized(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    factors = (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt_()
    return x * (factors * scale), factors


def _of_heads(x: Tensor, heads: Tensor) -> Tensor:
    """Those of each head from those of key heads, times factors of heads: (chunks, batch x heads, CHUNK, …)."""
    grouped: Tensor = heads.unflatten(1, (x.shape[1], -1))
    return (x.unsqueeze(2) * grouped).flatten(1, 2)


def _of_key_heads(x: Tensor, key_heads: int) -> Tensor:
    """The sum over the heads of each key head."""
    return x if x.shape[1] == key_heads else x.unflatten(1, (key_heads, -1)).sum(2)


def _chunks(
    queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, betas: Tensor, starts: Tensor | None, part: slice
) -> _Chunks:
    size = min(CHUNK, part.stop - part.start)
    q, query_factors = _normalized(_split(queries[:, part], size), queries.shape[-1] ** -0.5)
    k, key_factors = _normalized(_split(keys[:, part], size), 1.0)
    v, beta = _split(values[:, part], size), _split(betas[:, part].unsqueeze(-1), size)
    total = cumulative_sum(_split(decays[:, part], size))
    earlier = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    decay = total.unsqueeze(-1) - total.unsqueeze(-2)
    from_start, to_end = total.exp(), (total[..., -1:] - total).exp_()
    through = from_start[..., -1:]
    if starts is None:
        decay.masked_fill_(~earlier, -torch.inf)
    else:
        # documents of a chunk; 0: the one that began before it
        documents = _split(starts[:, part].unsqueeze(2), size).to(torch.int64).cumsum(-1)
        documents = documents.repeat_interleave(values.shape[2], dim=1)
        decay.masked_fill_(~(earlier & (documents.unsqueeze(-1) == documents.unsqueeze(-2))), -torch.inf)
        goes_on = documents == 0
        to_end = to_end * (documents == documents[..., -1:])
        from_start, through = from_start * goes_on, through * goes_on[..., -1:]
    decay.exp_()
    from_start, to_end, through = (x.unsqueeze(-1) for x in (from_start, to_end, through))
    products = _of_heads(k @ k.mT, decay * beta).tril_(-1)
    both = torch.cat((v * beta, _of_heads(k, from_start * beta)), -1)
    solved = torch.linalg.solve_triangular(products, both, upper=False, unitriangular=True)
    solved_values, solved_keys = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    return _Chunks(
        *(q, query_factors, k, key_factors, v, beta, decay, from_start, to_end, through, products),
        scores=_of_heads(q @ k.mT, decay),
        decayed_queries=_of_heads(q, from_start),
        decayed_keys=_of_heads(k, to_end),
        solved_values=solved_values,
        solved_keys=solved_keys,
    )


def _scan(chunks: _Chunks, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(corrections of values, states before each chunk, state after the last one).

    Products are added in place: otherwise each would first copy what it is added to, in one more kernel on GPUs.
    """
    corrections = chunks.solved_values.clone(memory_format=torch.contiguous_format)
    states = state.new_empty(len(corrections) + 1, *state.shape)
    states[0] = state
    for index, own in enumerate(corrections):
        own.baddbmm_(chunks.solved_keys[index], states[index], alpha=-1)
        torch.mul(states[index], chunks.through[index], out=states[index + 1])
        states[index + 1].baddbmm_(chunks.decayed_keys[index].mT, own)
    return corrections, states[:-1], states[-1]


@torch.library.custom_op("titanlite::gated_delta_rule_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    starts: Tensor | None,
    states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys, values, decays and betas."""
    batch, seq_len = values.shape[:2]
    inputs = (queries, keys, values, decays, betas)
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    of_state = torch.zeros_like(states[0])
    for index, part in reversed(list(enumerate(_segments(seq_len)))):
        chunks = _chunks(queries, keys, values, decays, betas, starts, part)
        *gradients, of_state = _backward_of_segment(chunks, states[index], gradient[:, part], of_state)
        for whole, own in zip(found, gradients, strict=True):
            whole[:, part] = _joined(own, batch, part.stop - part.start)
    queries_, keys_, values_, decays_, betas_ = found
    return queries_, keys_, values_, decays_, betas_


@_backward.register_fake
def _(
    _gradient: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    _starts: Tensor | None,
    _states: Tensor,
) -> tuple[Tensor, ...]:
    inputs = (queries, keys, values, decays, betas)
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)


def _backward_of_segment(chunks: _Chunks, state: Tensor, gradient: Tensor, of_state: Tensor) -> tuple[Tensor, ...]:
    """The gradients of the segment's inputs, and of the state before it. of_state: of the state after it."""
    corrections, states, _ = _scan(chunks, state)
    key_heads = chunks.keys.shape[1]
    own = _split(gradient, chunks.keys.shape[2])
    of_corrections = chunks.scores.mT @ own
    of_states = torch.cat((chunks.decayed_queries.mT @ own, of_state.unsqueeze(0)))
    of_next = of_states[1:]
    for index in reversed(range(len(states))):
        of_corrections[index].baddbmm_(chunks.decayed_keys[index], of_next[index])
        of_states[index].baddbmm_(chunks.solved_keys[index].mT, of_corrections[index], alpha=-1)
        of_states[index].add_(of_next[index] * chunks.through[index])
    # of decayed_queries, scores, decayed_keys, and of the solution
    of_queries = own @ states.mT
    of_scores = (own @ corrections.mT).mul_(chunks.decay)
    of_keys = corrections @ of_next.mT
    of_solved = torch.cat((of_corrections, -(of_corrections @ states.mT)), -1)
    of_both = torch.linalg.solve_triangular(chunks.products.mT, of_solved, upper=True, unitriangular=True)
    solved = torch.cat((chunks.solved_values, chunks.solved_keys), -1)
    of_products = -(of_both @ solved.mT).tril_(-1)
    of_values, of_solved_keys = of_both.split([chunks.values.shape[-1], chunks.keys.shape[-1]], dim=-1)
    # logarithms of decays: each decay times its gradient
    q, k = chunks.queries, chunks.keys
    pairs = of_products * chunks.products + of_scores * _of_heads(q @ k.mT, torch.ones_like(chunks.betas))
    starts = (of_queries * chunks.decayed_queries).sum(-1)
    of_keyed = _dot(of_solved_keys, k) * chunks.from_start
    starts = starts + (of_keyed * chunks.betas).squeeze(-1)
    ends = (of_keys * chunks.decayed_keys).sum(-1)
    # a position's is in all pairs around it, which are added up: differences would cancel where decays are fast
    later = torch.ones(pairs.shape[-2:], dtype=pairs.dtype, device=pairs.device).triu()
    of_decays = (later @ pairs).tril_(-1).sum(-1) + cumulative_sum(starts.flip(-1)).flip(-1)
    of_decays += functional.pad(cumulative_sum(ends[..., :-1]), (1, 0))
    of_decays += (of_next * states).sum((-2, -1)).unsqueeze(-1) * chunks.through.squeeze(-1)
    of_products *= chunks.decay
    of_betas = (of_values * chunks.values).sum(-1, keepdim=True) + of_keyed
    of_betas = of_betas + _dot(of_products, k @ k.mT)
    of_products *= chunks.betas
    of_products = _of_key_heads(of_products, key_heads)
    of_scores = _of_key_heads(of_scores, key_heads)
    of_q = _of_key_heads(of_queries * chunks.from_start, key_heads) + of_scores @ k
    of_k = _of_key_heads(of_keys * chunks.to_end + of_solved_keys * (chunks.from_start * chunks.betas), key_heads)
    of_k = of_k + of_scores.mT @ q + (of_products + of_products.mT) @ k
    scale = q.shape[-1] ** -0.5
    return (
        _of_normalized(of_q * scale, q / scale, chunks.query_factors),
        _of_normalized(of_k, k, chunks.key_factors),
        of_values * chunks.betas,
        of_decays,
        of_betas.squeeze(-1),
        of_states[0].clone(),  # frees the others
    )


def _dot(of_heads: Tensor, of_key_heads: Tensor) -> Tensor:
    """Sums of products along the last dimension: (chunks, batch x heads, CHUNK, 1)."""
    grouped: Tensor = of_heads.unflatten(1, (of_key_heads.shape[1], -1))
    return (grouped * of_key_heads.unsqueeze(2)).sum(-1, keepdim=True).flatten(1, 2)


def _of_normalized(gradient: Tensor, normalized: Tensor, factors: Tensor) -> Tensor:
    return (gradient - normalized * (gradient * normalized).sum(-1, keepdim=True)) * factors


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *others, state = inputs
    assert state is None, "a state has no gradient"
    ctx.save_for_backward(*others, output[1])
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, gradient: Tensor, _of_states: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, starts, states = ctx.saved_tensors
    return (*_backward(gradient, *inputs, starts, states), None, None)


_gated_delta_rule.register_autograd(_gradients, setup_context=_save)
