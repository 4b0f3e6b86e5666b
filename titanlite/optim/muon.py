"""Muon: orthogonalized momentum. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); decay
and scale of Liu et al., "Muon is Scalable for LLM Training" (2025).

A rank has the momentum of its shards. Each matrix is orthogonalized by its owner (titanlite/optim/owners.py).
"""

import math
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from titanlite.optim.newton_schulz import flops, orthogonalize
from titanlite.optim.optimizer import Arguments, OptimizerConfig, OptimizerKind, SkippingOptimizer
from titanlite.optim.owners import Matrix, Owners
from titanlite.parallel.mesh import ShardGroups
from titanlite.precision import DTYPES
from titanlite.runtime.dtensors import local_part

Adjustment = Literal["match_rms_adamw", "original"]


def adjusted(adjustment: Adjustment, rows: int, columns: int) -> float:
    """The factor of the update of a matrix.

    match_rms_adamw: 0.2 sqrt(max(rows, columns)), so that the root mean square of its elements is about 0.2, as in
    updates of AdamW (Liu et al., section 2.2). original: sqrt(max(1, rows / columns)) (Jordan et al.).
    """
    if adjustment == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def muon_dtype(section: OptimizerConfig, parameters: torch.dtype) -> torch.dtype:
    """The dtype of the orthogonalization and its messages, for parameters of this dtype."""
    if section.newton_schulz_dtype == "auto":
        return torch.promote_types(parameters, torch.float32)
    return DTYPES[section.newton_schulz_dtype]


class Muon(SkippingOptimizer):
    """Muon for matrices (rows, columns), and stacks of them. `step` is a collective of `shard_groups`.

    State: momentum, of the parameter's shape, dtype and placement. Nothing is read from the device.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        steps: int,
        coefficients: tuple[float, float, float],
        dtype: torch.dtype,
        adjustment: Adjustment,
        shard_groups: ShardGroups,
    ) -> None:
        """groups: see Arguments. dtype: of the orthogonalization and its messages."""
        super().__init__(groups, {"lr": lr})
        self._adjustment, self._dtype = adjustment, dtype
        self._orthogonalize = partial(orthogonalize, steps=steps, coefficients=coefficients)
        self._parameters = list(self.each())
        self._wide = torch.promote_types(self._parameters[0][0].dtype, torch.float32)
        self._owners = Owners(
            [parameter for parameter, _ in self._parameters], shard_groups, partial(flops, steps=steps)
        )

    def zero_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(parameter, requires_grad=False)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update all parameters, unless found_inf. A parameter without a gradient stays unchanged."""
        self.init_state()
        self._ok = self.found_inf == 0
        self._owners.apply(self._direction, self._orthogonalize, self._update, self._dtype)

    def _direction(self, matrix: Matrix) -> Tensor:
        """Update this rank's part of the momentum; returns that of the matrix to orthogonalize."""
        parameter, group = self._parameters[matrix.parameter]
        before = matrix.part_of(local_part(self.state[parameter]["momentum"]))
        if parameter.grad is None:
            return torch.zeros_like(before, dtype=self._dtype)
        gradient, decay = matrix.part_of(local_part(parameter.grad)).to(self._wide), group["momentum"]
        after = before.to(self._wide).lerp(gradient, 1 - decay)
        before.copy_(torch.where(self._ok, after.to(before.dtype), before))
        return gradient.lerp(after, decay).to(self._dtype)  # Nesterov's form

    def _update(self, matrix: Matrix, result: Tensor) -> None:
        """Update this rank's part of the weights. result: of the orthogonalized matrix."""
        parameter, group = self._parameters[matrix.parameter]
        if parameter.grad is None:
            return
        weights = matrix.part_of(local_part(parameter))
        factor = group["lr"] * adjusted(self._adjustment, *matrix.shape)
        updated = weights.to(self._wide) * (1 - group["lr"] * group["weight_decay"])
        updated.sub_(result.to(self._wide), alpha=factor)
        weights.copy_(torch.where(self._ok, updated.to(weights.dtype), weights))


def build(arguments: Arguments) -> Muon:
    section = arguments.section
    a, b, c = section.newton_schulz_coefficients
    (_, first), *_ = arguments.groups[0]["params"]
    return Muon(
        arguments.groups,
        lr=section.lr,
        steps=section.newton_schulz_steps,
        coefficients=(a, b, c),
        dtype=muon_dtype(section, first.dtype),
        adjustment=section.adjust_lr,
        shard_groups=arguments.shard_groups,
    )


MUON = OptimizerKind(build, options=("momentum",), takes_matrices=True, momentum=0.95)
