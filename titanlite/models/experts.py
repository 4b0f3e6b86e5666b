"""Mixture of experts: each position is processed by a few of many feed-forward layers, chosen by a router.

The choice does not depend on the layout: ties go to the expert with the lowest index, no position is dropped, and the
results of the experts of a position are added up in the order of their choice.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional


class Router(nn.Linear):
    """The score of each expert: weight x, in promote_types(x.dtype, float32)."""

    def __init__(self, dim: int, n_experts: int) -> None:
        super().__init__(dim, n_experts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seq_len, dim). Returns (batch, seq_len, n_experts)."""
        return router_scores(x, self.weight)


def router_scores(x: Tensor, weight: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return functional.linear(x.to(wide), weight.to(wide))


class Experts(nn.Module):
    """SwiGLU layers, stacked: w2[e](silu(w1[e] x) * w3[e] x) for expert e."""

    def __init__(self, n_experts: int, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts of each position.

        x: (batch, seq_len, dim); chosen: int64 (batch, seq_len, n_active), the experts of each position; weights: their
        weights, of the same shape, in promote_types(x.dtype, float32). Returns the shape and dtype of x.
        """
        return weighted_experts(x, chosen, weights, self.w1, self.w2, self.w3)


def weighted_experts(x: Tensor, chosen: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """Experts.forward with these weight matrices; with a part of the hidden features, a part of a sum."""
    n_active = chosen.shape[-1]
    experts = chosen.flatten()
    order = experts.argsort(stable=True)  # by expert, then by position
    rows = x.flatten(0, -2)[order // n_active]
    counts = torch.zeros(len(w1), dtype=torch.int64, device=x.device).scatter_add(0, experts, torch.ones_like(experts))
    processed = feed_forward(rows, counts, w1, w2, w3)
    # By position again: a gather in both directions, whose order of summation is fixed.
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    by_position = processed[inverse].view(*chosen.shape, -1)
    return (by_position.to(weights.dtype) * weights.unsqueeze(-1)).sum(dim=-2).to(x.dtype)


def feed_forward(rows: Tensor, counts: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """SwiGLU of each row by its expert. rows: (rows, dim), sorted by expert; counts: int64 (n_experts,).

    In bfloat16 on CUDA the host does not read the counts.
    """
    if rows.device.type == "cuda" and rows.dtype == torch.bfloat16:
        return grouped_feed_forward(rows, counts, w1, w2, w3)
    parts = rows.split(counts.tolist())
    experts = zip(parts, w1.unbind(), w2.unbind(), w3.unbind(), strict=True)
    return torch.cat([_swiglu(functional.linear, part, one, two, three) for part, one, two, three in experts])


def grouped_feed_forward(rows: Tensor, counts: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """feed_forward by torch's grouped matrix products."""
    offsets = counts.cumsum(0, dtype=torch.int32)

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return functional.grouped_mm(x, weight.transpose(-2, -1), offs=offsets)

    return _swiglu(product, rows, w1, w2, w3)


def _swiglu(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return product(functional.silu(product(x, w1)) * product(x, w3), w2)


class MixtureOfExperts(nn.Module):
    """Feed-forward layer of `n_experts` experts, of which each position uses the `n_active` most probable.

    The probabilities are the softmax of the router's scores. The weights of the chosen experts are their probabilities,
    divided by their sum. balance_loss, z_loss: coefficients of these losses, whose gradients each backward pass adds.

    rows_per_step: rows of the global batch, over which these losses are means. own_share: share of this rank in the
    losses of its positions; 0 if another rank has the same ones. row_group: the ranks that hold the other positions of
    the same rows, if there are any. Parallelism sets them.
    """

    def __init__(
        self, dim: int, hidden_dim: int, n_experts: int, n_active: int, balance_loss: float, z_loss: float
    ) -> None:
        super().__init__()
        self.n_active = n_active
        self.balance_loss = balance_loss
        self.z_loss = z_loss
        self.rows_per_step = 1
        self.own_share = 1.0
        self.row_group: dist.ProcessGroup | None = None
        self.router = Router(dim, n_experts)
        self.experts = Experts(n_experts, dim, hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seq_len, dim). Returns the same shape."""
        scores: Tensor = self.router(x)
        probabilities = scores.softmax(dim=-1)
        # a copy, as a view would keep the indices of all experts
        chosen = probabilities.detach().sort(dim=-1, descending=True, stable=True).indices[..., : self.n_active].clone()
        weights = probabilities.gather(-1, chosen)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        if torch.is_grad_enabled():
            if self.balance_loss:
                weights = self._add(weights, self.balance_loss * balance(probabilities, chosen, self.row_group))
            if self.z_loss:
                seq_len = scores.shape[1] * (1 if self.row_group is None else self.row_group.size())
                weights = self._add(weights, self.z_loss / seq_len * scores.logsumexp(dim=-1).square().sum(dim=1))
        out: Tensor = self.experts(x, chosen, weights)
        return out

    def _add(self, weights: Tensor, losses: Tensor) -> Tensor:
        """Return the weights, whose backward pass adds the gradient of the mean of losses, (batch,), of rows."""
        loss = losses.sum() * (self.own_share / self.rows_per_step)
        added: Tensor = _AddLoss.apply(weights, loss)  # type: ignore[no-untyped-call]
        return added


def balance(probabilities: Tensor, chosen: Tensor, row_group: dist.ProcessGroup | None) -> Tensor:
    """Balance loss of each row, (batch,): the sum over the experts of f P, where P is the mean probability of an expert
    in the row, and f its share of the row's choices times the number of experts; 1 if all are equal.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), equations 17 to 20, with probabilities that add up to 1.
    probabilities: (batch, seq_len, n_experts); chosen: (batch, seq_len, n_active). row_group: an all-reduce over it
    adds the other positions of the rows; the gradient is that of the own ones, and all ranks' add up to the loss's.
    """
    _, seq_len, n_experts = probabilities.shape
    n_active, mass = chosen.shape[-1], probabilities.sum(dim=1)
    choices = chosen.flatten(1)
    counts = torch.zeros_like(mass).scatter_add(1, choices, torch.ones_like(choices, dtype=mass.dtype))
    if row_group is not None:
        both = torch.stack((counts, mass.detach()))
        dist.all_reduce(both, group=row_group)
        counts, mass, seq_len = both[0], mass + (both[1] - mass.detach()), seq_len * row_group.size()
    return (counts * (n_experts / (n_active * seq_len)) * (mass / seq_len)).sum(dim=-1)


class _AddLoss(torch.autograd.Function):
    """The identity of x; the backward pass also differentiates `loss`, a scalar, with weight 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (one,) = ctx.saved_tensors
        return gradient, one
