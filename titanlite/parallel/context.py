"""Context parallelism: each rank holds a part of the positions of every row. Only attention needs the others.

"heads": around attention, ranks exchange heads for positions (Jacobs et al., "DeepSpeed Ulysses", 2023): each computes
entire rows with n_heads / cp of the heads, so that masks and kernels do not change. "gather": each rank gathers all
keys and values for its queries (Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.3.2), whose positions
are an early and a late part of the row, so that all ranks compute equally many scores. Gated linear attention exchanges
heads for positions with both.

Nothing is divided by cp: each rank has the loss of its positions, and gradients are sums over all ranks.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.models.attention import AttentionMask, attention_mask
from titanlite.models.family import DecoderConfig, LanguageModel
from titanlite.models.mixer import mixers_of
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
    for mixer in mixers_of([model]):
        mixer.cp_group, mixer.cp_form = group, form  # type: ignore[assignment]
        core = over_gathered if form == "gather" and mixer.gathered else over_heads
        # A method, since torch's compiler would compile each block anew for a partial function.
        mixer.core = MethodType(core, mixer)  # type: ignore[method-assign]
    if form == "gather":
        model.attention_mask = partial(mask_of_own_queries, group=group)
    return [f"context parallel ({form})"]


def over_heads(mixer: Any, inputs: Sequence[Tensor], seen: Any, by_head: Mapping[str, Tensor]) -> Tensor:
    """The core of a mixer for this rank's positions, (batch, seq_len / cp, heads, width): with entire rows of 1 / cp of
    the heads. seen: of entire rows. If there are fewer heads of an input than ranks, several ranks compute with the
    same one. One exchange for all inputs, in the widest of their dtypes."""
    group, cp = mixer.cp_group, mixer.cp_group.size()
    inputs = [enough_heads(x, cp, dim=2) for x in inputs]
    parts = [x.unflatten(2, (cp, -1)) for x in inputs]  # (batch, seq_len / cp, cp, heads / cp, width)
    joined = _HeadsForPositions.apply(torch.cat([x.flatten(3) for x in parts], dim=-1), group, 2, 1).squeeze(2)  # type: ignore[no-untyped-call]
    if mixer.cp_form == "gather":
        order = _order(joined.shape[1], cp, joined.device)
        joined = joined[:, order]
    split = joined.split([x.shape[3] * x.shape[4] for x in parts], dim=-1)
    own = [x.unflatten(-1, part.shape[3:]).to(part.dtype) for x, part in zip(split, parts, strict=True)]
    own_by_head = {name: enough_heads(x, cp).chunk(cp)[group.rank()] for name, x in by_head.items()}
    out = type(mixer).core(mixer, own, seen, own_by_head)
    if mixer.cp_form == "gather":
        out = out[:, order.argsort()]
    mixed: Tensor = _HeadsForPositions.apply(out, group, 1, 2)  # type: ignore[no-untyped-call]
    return mixed


def enough_heads(x: Tensor, parts: int, dim: int = 0) -> Tensor:
    """Heads along `dim`, repeated if there are fewer than parts."""
    return x if x.shape[dim] >= parts else x.repeat_interleave(parts // x.shape[dim], dim=dim)


def over_gathered(mixer: Any, inputs: Sequence[Tensor], seen: Any, by_head: Mapping[str, Tensor]) -> Tensor:
    """The core of a mixer for this rank's queries and entire rows of what they may see. seen: see
    mask_of_own_queries."""
    if seen is None or seen.shape[-2] != inputs[0].shape[1]:
        raise RuntimeError(
            'the mask is not one of this rank\'s queries: with parallelism.context_parallel = "gather" a family builds '
            "it with self.attention_mask"
        )
    inputs = [
        _GatherPositions.apply(x.transpose(1, 2), mixer.cp_group).transpose(1, 2) if index in mixer.gathered else x  # type: ignore[no-untyped-call]
        for index, x in enumerate(inputs)
    ]
    out: Tensor = type(mixer).core(mixer, inputs, seen, by_head)
    return out


def _order(seq_len: int, cp: int, device: torch.device) -> Tensor:
    """Where the positions of entire rows are in those of the ranks one after the other, with the form "gather"."""
    parts = torch.arange(seq_len, device=device).unflatten(0, (cp, 2, -1))
    return torch.cat((parts[:, 0], parts[:, 1].flip(0))).flatten()


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
