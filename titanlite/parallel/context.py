"""Context parallelism: each rank holds a part of the positions of every row. Only attention needs the others.

Around attention, ranks exchange heads for positions (Jacobs et al., "DeepSpeed Ulysses", 2023): each computes entire
rows with n_heads / cp of the heads, so that masks and kernels do not change. Nothing is divided by cp: each rank has
the loss of its positions, and gradients are sums over all ranks.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.models.attention import AttentionMask, attend
from titanlite.models.family import DecoderConfig
from titanlite.models.layers import Attention
from titanlite.parallel.mesh import ParallelismConfig
from titanlite.runtime.errors import Problem, require


def apply_context_parallel(model: nn.Module, group: dist.ProcessGroup | None) -> list[str]:
    """Let the attention of the model see entire rows, in place; return descriptions for the start log.

    group: the ranks of the cp axis, in the order of their positions; None: there is one.
    """
    if group is None:
        return []
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = partial(attend_over_ranks, group=group)
    return ["context parallel"]


def attend_over_ranks(
    queries: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask | None, *, group: dist.ProcessGroup
) -> Tensor:
    """`attend` for this rank's positions: (batch, heads, seq_len / cp, head_dim), the result as the queries.

    mask: of entire rows. If there are fewer heads of keys than ranks, several ranks compute with the same one.
    """
    cp = group.size()
    if keys.shape[1] < cp:
        keys, values = (x.repeat_interleave(cp // x.shape[1], dim=1) for x in (keys, values))
    queries, keys, values = (_Exchange.apply(x, group, 1, 2) for x in (queries, keys, values))  # type: ignore[no-untyped-call]
    attended: Tensor = _Exchange.apply(attend(queries, keys, values, mask), group, 2, 1)  # type: ignore[no-untyped-call]
    return attended


class _Exchange(torch.autograd.Function):
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
    # A functional collective, which compiled blocks know.
    operations = torch.ops._c10d_functional
    received = operations.wait_tensor(operations.all_to_all_single(sent, counts, counts, group.group_name))
    return torch.cat(received.unbind(), dim=join)


def check_context(section: ParallelismConfig, model: DecoderConfig, seq_len: int) -> list[Problem]:
    """Problems between cp, the heads of the model and the sequences. The sizes of the model must be valid."""
    cp, tp = section.cp, section.tp
    if cp <= 1 or tp < 1:
        return []
    parts = cp * tp
    n_heads, n_kv_heads = model.n_heads // tp, model.n_kv_heads // tp
    fits = [size for size in range(1, cp) if n_heads % size == 0 and (n_kv_heads % size == 0 or size % n_kv_heads == 0)]
    return [
        *require(
            seq_len % parts == 0,
            "training.seq_len",
            seq_len,
            f"divisible by parallelism.cp x tp = {parts}: each rank holds an equal part of the positions",
            f"set training.seq_len = {max(seq_len // parts, 1) * parts}",
        ),
        *require(
            n_heads % cp == 0 and (n_kv_heads % cp == 0 or cp % max(n_kv_heads, 1) == 0),
            "parallelism.cp",
            cp,
            f"divides n_heads / tp = {n_heads}, and divides n_kv_heads / tp = {n_kv_heads} or is a multiple of it: "
            "ranks share the heads during attention",
            f"parallelism.cp = {max(fits, default=1)}, and the other ranks for dp_shard, tp or pp",
        ),
    ]
