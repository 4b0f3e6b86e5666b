"""QK-clip: after an update, scale the weights of queries and keys of heads whose largest attention score is above a
threshold. Kimi Team, "Kimi K2: Open Agentic Intelligence" (2025), section 2.1."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.models.attention import attend
from titanlite.models.family import has_own
from titanlite.models.init import local_region
from titanlite.models.layers import Attention
from titanlite.optim.optimizer import OptimizerConfig
from titanlite.runtime.errors import Problem


def attentions_of(model_parts: Iterable[nn.Module]) -> list[Attention]:
    return [module for part in model_parts for module in part.modules() if isinstance(module, Attention)]


def check_qk_clip(section: OptimizerConfig, model: nn.Module) -> list[Problem]:
    """Problems of optimizer.qk_clip, above 0, with the attention of a full model."""
    attentions, remedy = attentions_of([model]), "leave it out"
    if not attentions or any(_is_own(each) for each in attentions):
        rule = "0 with a family whose attention is its own, and not titanlite.models.layers.Attention"
    elif any(each.q_norm is not None for each in attentions):
        rule = "0 with a family that normalizes queries and keys: their weights do not change how large scores are"
    elif any(each.cap for each in attentions):
        rule, remedy = "0 with capped scores, which model.score_cap bounds", "leave it out, or model.score_cap = 0.0"
    else:
        return []
    return [Problem("optimizer.qk_clip", section.qk_clip, rule, remedy)]


def _is_own(attention: Attention) -> bool:
    names = ("forward", "heads", "attended")
    return attention.attend is not attend or any(has_own(attention, name, Attention) for name in names)


class QKClip:
    """Scales the rows of wq and wk of a head, and their biases, by the largest score of the head in a step.

    model_parts: of this rank, whose attention notes its scores. threshold: of a score. group: the ranks with the other
    rows and positions of the same layers and heads. first_head, heads: of this rank, of the heads of tp.

    With S the largest score of a head and g = threshold / S below 1: if each head of queries has keys of its own, both
    are multiplied by sqrt(g). Keys that several heads share stay, and the queries are multiplied by g.
    """

    def __init__(
        self, model_parts: Sequence[nn.Module], threshold: float, group: dist.ProcessGroup, tp: tuple[int, int]
    ) -> None:
        self._attentions = attentions_of(model_parts)
        self._threshold = threshold
        self._group = group
        self._tp = tp

    def start_step(self) -> None:
        for each in self._attentions:
            assert each.largest is not None, "scores are not noted"
            each.largest.fill_(-torch.inf)

    @torch.no_grad()
    def clip_if(self, ok: Tensor, *, counts: bool) -> Tensor:
        """Scale the weights if `ok`, a bool scalar on the device. Returns the largest score of this rank's heads, over
        the rows of all data ranks, a scalar. counts: whether this rank has a sequence of the run."""
        if not self._attentions:
            return torch.full((), -torch.inf, device=ok.device)
        noted = [each.largest for each in self._attentions if each.largest is not None]
        largest = torch.stack(noted) if counts else torch.full_like(torch.stack(noted), -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        factors = torch.where(ok & (largest > self._threshold), self._threshold / largest, 1.0)
        for attention, factor in zip(self._attentions, factors, strict=True):
            if attention.wq.weight.shape == attention.wk.weight.shape:
                self._scale_(attention.wq, attention.head_dim, factor.sqrt())
                self._scale_(attention.wk, attention.head_dim, factor.sqrt())
            else:
                self._scale_(attention.wq, attention.head_dim, factor)
        return largest.max()

    def _scale_(self, linear: nn.Linear, head_dim: int, factors: Tensor) -> None:
        """Multiply this rank's rows of a projection. factors: of this rank's heads."""
        for parameter in linear.parameters():
            local, shape, offset = local_region(parameter)
            rank, degree = self._tp
            rows = torch.arange(len(local), device=local.device) + (offset[0] - rank * (shape[0] // degree))
            of_rows = factors[rows // head_dim]
            local.mul_(of_rows if local.dim() == 1 else of_rows.unsqueeze(1))
