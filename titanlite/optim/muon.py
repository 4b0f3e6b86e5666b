"""Muon: orthogonalized momentum. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); decay
and scale of Liu et al., "Muon is Scalable for LLM Training" (2025).

A rank has the momentum of its shards. Each matrix is orthogonalized by its owner (titanlite/optim/owners.py).
"""

import math
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from titanlite.optim.optimizer import Arguments, OptimizerConfig, OptimizerKind, SkippingOptimizer, update_weights_
from titanlite.optim.owners import Matrix, Owners
from titanlite.precision import DTYPES
from titanlite.runtime.dtensors import local_part

Adjustment = Literal["match_rms_adamw", "original"]
SMALLEST_NORM = 1e-7
"""Smallest Frobenius norm that is divided by, so that a matrix of zeros stays zero."""


def orthogonalize(matrix: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """Approximate U V^T, where U S V^T is the singular value decomposition of `matrix`, (rows, columns).

    With the published coefficients, singular values end between about 0.7 and 1.2: their slope at 0 is steep. Computed
    in the dtype of `matrix`, with the norm in float32 at least.
    """
    a, b, c = coefficients
    wide = torch.promote_types(matrix.dtype, torch.float32)
    norm = torch.linalg.matrix_norm(matrix.to(wide)).clamp(min=SMALLEST_NORM)
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.to(wide) / norm).to(matrix.dtype)
    x = x.T if is_tall else x  # products of the smaller dimension
    for _ in range(steps):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    found: Tensor = x.T if is_tall else x
    return found


def flops(rows: int, columns: int, steps: int) -> int:
    """Of the matrix products of `orthogonalize`."""
    small, large = min(rows, columns), max(rows, columns)
    return steps * 2 * (2 * small * small * large + small**3)


def temporary_bytes(rows: int, columns: int, size: int) -> int:
    """Peak bytes of `orthogonalize`, with its input, in a dtype of `size` bytes.

    x, its product with a matrix of the smaller dimension, and two of those; before, the input and its quotient in
    float32.
    """
    elements, square = rows * columns, min(rows, columns) ** 2
    casts = 2 * 4 * elements if size < 4 else 0
    return elements * size + max((2 * elements + 2 * square) * size, casts)


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
    """Muon for matrices (rows, columns), and stacks of them. `step` is a collective of the arguments' shard_groups.

    State: momentum, of the parameter's shape, dtype and placement. Nothing is read from the device.
    """

    def __init__(self, arguments: Arguments) -> None:
        section = arguments.section
        super().__init__(arguments.groups, {"lr": section.lr})
        self._parameters = list(self.each())
        parameters = [parameter for parameter, _ in self._parameters]
        steps, (a, b, c) = section.newton_schulz_steps, section.newton_schulz_coefficients
        self._adjustment: Adjustment = section.adjust_lr
        self._dtype = muon_dtype(section, parameters[0].dtype)
        self._wide = torch.promote_types(parameters[0].dtype, torch.float32)
        self._orthogonalize = partial(orthogonalize, steps=steps, coefficients=(a, b, c))
        self._owners = Owners(parameters, arguments.shard_groups, partial(flops, steps=steps))

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
        factor = adjusted(self._adjustment, *matrix.shape)
        update_weights_(weights, result.to(self._wide), group, self._ok, factor)


MUON = OptimizerKind(Muon, options=("momentum",), takes_matrices=True, momentum=0.95)
