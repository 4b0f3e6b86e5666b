"""Context parallelism: each rank holds a part of the positions of every row. Only attention needs the others.

"heads": around attention, ranks exchange heads for positions (Jacobs et al., "DeepSpeed Ulysses", 2023): each computes
entire rows with n_heads / cp of the heads, so that masks and kernels do not change. "gather": each rank gathers all
keys and values for its queries (Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.3.2), whose positions
are an early and a late part of the row, so that all ranks compute equally many scores. Gated linear attention exchanges
heads for positions with both.

Nothing is divided by cp: each rank has the loss of its positions, and gradients are sums over all ranks.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.models.attention import AttentionMask, Kernel, attention_mask
from titanlite.models.family import DecoderConfig, LanguageModel
from titanlite.models.layers import HeadAttention
from titanlite.models.linear_attention import GatedDeltaNet, Mixer
from titanlite.parallel.collectives import all_gather, all_to_all, reduce_scatter
from titanlite.parallel.mesh import ContextParallel, ParallelismConfig, part_of_rows
from titanlite.runtime.errors import Problem, Rules


def apply_context_parallel(model: LanguageModel, group: dist.ProcessGroup | None, form: ContextParallel) -> list[str]:
    """Let the attention of the model see entire rows, in place; return descriptions for the start log.

    group: the ranks of the cp axis, in the order of `part_of_rows`; None: there is one. The own attention function of a
    family is called with what this rank has: see `own_code.context_problem`.
    """
    if group is None:
        return []
    exchange = attend_over_heads if form == "heads" else attend_to_gathered
    for module in model.modules():
        if isinstance(module, HeadAttention):
            module.attend = partial(exchange, module.attend, group=group)
        elif isinstance(module, GatedDeltaNet):
            module.mix = partial(mix_over_heads, module.mix, group=group, form=form)
    if form == "gather":
        model.attention_mask = partial(mask_of_own_queries, group=group)
    return [f"context parallel ({form})"]


def attend_over_heads(
    kernel: Kernel,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: AttentionMask | None,
    *,
    group: dist.ProcessGroup,
    **options: Any,
) -> Tensor:
    """`kernel` for this rank's positions: (batch, heads, seq_len / cp, head_dim), the result as the queries.

    mask: of entire rows. If there are fewer heads of keys than ranks, several ranks compute with the same one. options:
    see `attend`; sinks and largest are those of all heads.
    """
    cp = group.size()
    for name in options.keys() & {"sinks", "largest"}:
        options[name] = options[name].chunk(cp)[group.rank()]
    if keys.shape[1] < cp:
        keys, values = (x.repeat_interleave(cp // x.shape[1], dim=1) for x in (keys, values))
    queries, keys, values = (_HeadsForPositions.apply(x, group, 1, 2) for x in (queries, keys, values))  # type: ignore[no-untyped-call]
    attended: Tensor = _HeadsForPositions.apply(kernel(queries, keys, values, mask, **options), group, 2, 1)  # type: ignore[no-untyped-call]
    return attended


def mix_over_heads(
    mixer: Mixer,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    starts: Tensor | None,
    *weights: Tensor,
    group: dist.ProcessGroup,
    form: ContextParallel,
) -> Tensor:
    """`mixer` for this rank's positions, see `mix` in models/linear_attention.py: convolution and states see entire
    rows of 1 / cp of the heads. starts: of entire rows; weights: of all heads. One exchange for all inputs."""
    cp, rank, key_heads = group.size(), group.rank(), queries.shape[2]
    inputs = [x.flatten(2).unflatten(2, (key_heads, -1)) for x in (queries, keys, values, decays, betas)]
    joined = _HeadsForPositions.apply(torch.cat(inputs, dim=-1), group, 2, 1)  # type: ignore[no-untyped-call]
    if form == "gather":
        order = _order(joined.shape[1], cp, joined.device)
        joined = joined[:, order]
    queries, keys, values, decays, betas = joined.split([x.shape[-1] for x in inputs], dim=-1)
    values = values.flatten(2).unflatten(2, (-1, values.shape[-1] // (decays.shape[-1])))
    own = (weight.chunk(cp)[rank] for weight in weights)
    out = mixer(queries, keys, values, decays.flatten(2), betas.flatten(2), starts, *own)
    if form == "gather":
        out = out[:, order.argsort()]
    mixed: Tensor = _HeadsForPositions.apply(out, group, 1, 2)  # type: ignore[no-untyped-call]
    return mixed


def _order(seq_len: int, cp: int, device: torch.device) -> Tensor:
    """Where the positions of entire rows are in those of the ranks one after the other, with the form "gather"."""
    parts = torch.arange(seq_len, device=device).unflatten(0, (cp, 2, -1))
    return torch.cat((parts[:, 0], parts[:, 1].flip(0))).flatten()


def attend_to_gathered(
    kernel: Kernel,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: AttentionMask | None,
    *,
    group: dist.ProcessGroup,
    **options: Any,
) -> Tensor:
    """As attend_over_heads. mask: of this rank's queries and entire rows of keys, see mask_of_own_queries."""
    keys, values = (_GatherPositions.apply(x, group) for x in (keys, values))  # type: ignore[no-untyped-call]
    if mask is None or mask.shape[-2] != queries.shape[2]:
        raise RuntimeError(
            'the mask is not one of this rank\'s queries: with parallelism.context_parallel = "gather" a family builds '
            "it with self.attention_mask"
        )
    return kernel(queries, keys, values, mask, **options)


def mask_of_own_queries(
    document_ids: Tensor | None, dtype: torch.dtype, head_dim: int, window: int = 0, *, group: dist.ProcessGroup
) -> AttentionMask | None:
    """`attention_mask` of this rank's queries. document_ids: (batch, seq_len), of entire rows."""
    if document_ids is None:
        return None
    positions = torch.arange(document_ids.shape[1], device=document_ids.device).unsqueeze(0)
    own = part_of_rows(positions, group.rank(), group.size(), "gather").squeeze(0)
    return attention_mask(document_ids, dtype, head_dim, own, window)


class _HeadsForPositions(torch.autograd.Function):
    """All-to-all: split along dimension `split` over the ranks, joined along dimension `join`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, split: int, join: int) -> Tensor:
        ctx.arguments = group, join, split
        return _exchange(x, group, split, join)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradient, *ctx.arguments), None, None, None


def _exchange(x: Tensor, group: dist.ProcessGroup, split: int, join: int) -> Tensor:
    size = group.size()
    sent = torch.stack(x.chunk(size, dim=split))  # (cp, …): a part for each rank
    counts = [1] * size
    return torch.cat(all_to_all(sent, counts, counts, group).unbind(), dim=join)


class _GatherPositions(torch.autograd.Function):
    """All-gather of this rank's positions, the third of four dimensions, into entire rows in their order. The gradient
    is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        early, late = all_gather(x, group).unflatten(0, (group.size(), -1)).chunk(2, dim=3)
        return torch.cat((*early.unbind(), *late.flip(0).unbind()), dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        cp = ctx.group.size()
        parts = gradient.chunk(2 * cp, dim=2)
        by_rank = torch.cat([torch.cat((parts[rank], parts[2 * cp - 1 - rank]), dim=2) for rank in range(cp)])
        return reduce_scatter(by_rank, ctx.group), None


def check_context(section: ParallelismConfig, model: Any, seq_len: int) -> list[Problem]:
    """Problems between cp, the heads of the model and the sequences. The sizes of the model must be valid.

    model: the hyper-parameters, of any family.
    """
    cp, tp = section.cp, section.tp
    rules = Rules("parallelism", section)
    if cp <= 1 or tp < 1:
        return []
    if not isinstance(model, DecoderConfig):
        rule = "1 with a family whose hyper-parameters are no DecoderConfig: its attention may not know cp"
        return [Problem("parallelism.cp", cp, rule, "use dp_shard, tp or pp")]
    gathers = section.context_parallel == "gather"
    parts = math.lcm(2 * cp, cp * tp) if gathers else cp * tp
    if seq_len % parts:
        divisor = "2 x parallelism.cp, and by cp x tp:" if gathers else "parallelism.cp x tp ="
        nearest = dict.fromkeys((max(seq_len // parts, 1) * parts, (seq_len // parts + 1) * parts))
        remedy = f"set training.seq_len = {' or '.join(map(str, nearest))}"
        rules.problems.append(Problem("training.seq_len", seq_len, f"divisible by {divisor} {parts}", remedy))
    n_heads, n_kv_heads = model.n_heads // tp, max(model.n_kv_heads // tp, 1)
    fits = [size for size in range(1, cp + 1) if n_heads % size == 0 and 0 in (n_kv_heads % size, size % n_kv_heads)]
    rule = f"divides n_heads / tp = {n_heads}, and divides n_kv_heads / tp = {n_kv_heads} or is a multiple of it"
    remedy = f'parallelism.context_parallel = "gather", or parallelism.cp = {max(fits)}'
    rules.require("cp", gathers or cp in fits, rule, remedy)
    if model.linear_key_heads and not rules.problems:
        heads = model.linear_key_heads // tp
        rule = f"divides linear_key_heads / tp = {heads}: linear attention exchanges heads for positions"
        remedy = f"parallelism.cp = {math.gcd(cp, heads)}"
        rules.require("cp", heads % cp == 0, rule, remedy)
    return rules.problems
