"""Muon: orthogonalized momentum. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); decay
and scale of Liu et al., "Muon is Scalable for LLM Training" (2025); optionally the coefficients of Amsel et al., "The
Polar Express" (2025), and the scale of rows of Li et al., "NorMuon" (2025).

A rank has the momentum of its shards. Each matrix is orthogonalized by its owner (titanlite/optim/owners.py).
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from titanlite.models.linear import plus_product, product
from titanlite.optim.optimizer import Arguments, OptimizerConfig, OptimizerKind, SkippingOptimizer, update_weights_
from titanlite.optim.owners import Matrix, Owners
from titanlite.precision import DTYPES
from titanlite.runtime.torch_internals import is_dtensor, local_part

Adjustment = Literal["match_rms_adamw", "original"]
SMALLEST_NORM = 1e-7
"""Smallest Frobenius norm that is divided by, so that a matrix of zeros stays zero."""
ROW_EPS = 1e-10
"""Added to the root of the mean square of a row."""
Coefficients = tuple[float, float, float]
"""Of an iteration, a X + b (X X^T) X + c (X X^T)^2 X."""
POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""The odd polynomials of degree 5 that are closest to 1, one after the other, for singular values from 0.001 to 1. The
last one is that of all further iterations."""
SAFETY = 1.01
"""By which singular values are divided before each iteration but the last of POLAR_EXPRESS, and once more at the
beginning, since rounding may bring one above 1, where the polynomials grow (Amsel et al., algorithm 1)."""


def iterations(section: OptimizerConfig) -> list[Coefficients]:
    """The coefficients of all iterations."""
    if section.orthogonalization == "newton_schulz":
        a, b, c = section.newton_schulz_coefficients
        return [(a, b, c)] * section.newton_schulz_steps
    *first, last = POLAR_EXPRESS
    found = [_of_smaller(each, SAFETY) for each in first] + [last] * section.newton_schulz_steps
    return [_of_smaller(found[0], SAFETY), *found[1 : section.newton_schulz_steps]]


def _of_smaller(coefficients: Coefficients, factor: float) -> Coefficients:
    """Those of the iteration of X / factor."""
    a, b, c = coefficients
    return a / factor, b / factor**3, c / factor**5


def orthogonalize(matrix: Tensor, coefficients: Sequence[Coefficients]) -> Tensor:
    """Approximate U V^T, where U S V^T is the singular value decomposition of `matrix`, (rows, columns).

    coefficients: of each iteration. With those of Jordan et al., singular values end between about 0.7 and 1.2: their
    slope at 0 is steep. Computed in the dtype of `matrix`, with the norm in float32 at least.
    """
    wide = torch.promote_types(matrix.dtype, torch.float32)
    norm = torch.linalg.matrix_norm(matrix.to(wide)).clamp(min=SMALLEST_NORM)
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.to(wide) / norm).to(matrix.dtype)
    x = x.T if is_tall else x  # products of the smaller dimension
    for a, b, c in coefficients:
        square = product(x, x)
        x = plus_product(x, plus_product(square, square, square.T, beta=b, alpha=c), x.T, beta=a)
    found: Tensor = x.T if is_tall else x
    return found


def scale_rows_(matrix: Tensor, squares: Tensor, beta2: float) -> Tensor:
    """Divide the rows of an orthogonalized matrix, (rows, columns), by the roots of their decaying mean squares, and
    multiply it by the number that keeps its Frobenius norm. Returns the mean squares after this step.

    squares: those before it, (rows, 1), in float32 at least.
    """
    means = torch.linalg.vector_norm(matrix, dim=1, keepdim=True, dtype=squares.dtype).square() / matrix.shape[1]
    squares = squares.lerp(means, 1 - beta2)
    factors = 1 / (squares.sqrt() + ROW_EPS)
    norm = (means * factors.square()).sum().sqrt().clamp(min=SMALLEST_NORM)
    matrix.mul_(factors * (means.sum().sqrt() / norm))
    return squares


def zeros_of_rows(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A zero for each row of each matrix of a parameter, (..., rows, 1), placed as the rows are."""
    local = local_part(parameter)
    zeros = local.new_zeros((*local.shape[:-1], 1), dtype=dtype)
    if not is_dtensor(parameter):
        return zeros
    from torch.distributed.tensor import DTensor, Replicate

    shape = torch.Size((*parameter.shape[:-1], 1))
    placements = [Replicate() if each.is_shard(parameter.dim() - 1) else each for each in parameter.placements]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(zeros, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride)


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

    State: momentum, of the parameter's shape, dtype and placement; with normuon_beta2, row_squares, see `scale_rows_`,
    which travel with the parts of a matrix as further columns. Nothing is read from the device.
    """

    def __init__(self, arguments: Arguments) -> None:
        section = arguments.section
        super().__init__(arguments.groups, {"lr": section.lr})
        self._parameters = list(self.each())
        parameters = [parameter for parameter, _ in self._parameters]
        self._adjustment: Adjustment = section.adjust_lr
        self._dtype = muon_dtype(section, parameters[0].dtype)
        self._wide = torch.promote_types(parameters[0].dtype, torch.float32)
        self._beta2 = section.normuon_beta2 if section.normuon_beta2 != -1 else None
        self._coefficients = iterations(section)
        extra = 0 if self._beta2 is None else packed(torch.zeros(1, 1, dtype=self._wide), self._dtype).shape[1]
        cost = partial(flops, steps=len(self._coefficients))
        self._owners = Owners(parameters, arguments.shard_groups, cost, extra)

    def zero_state(self, parameter: Tensor) -> dict[str, Tensor]:
        momentum = {"momentum": torch.zeros_like(parameter, requires_grad=False)}
        return momentum if self._beta2 is None else momentum | {"row_squares": zeros_of_rows(parameter, self._wide)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update all parameters, unless found_inf. A parameter without a gradient stays unchanged."""
        self.init_state()
        self._ok = self.found_inf == 0
        self._owners.apply(self._part, self._owned, self._update, self._dtype)

    def _part(self, matrix: Matrix) -> Tensor:
        """This rank's part of the matrix to orthogonalize, with the mean squares of its rows."""
        direction = self._direction(matrix)
        return (
            direction if self._beta2 is None else torch.cat((direction, packed(self._squares(matrix), self._dtype)), 1)
        )

    def _owned(self, matrix: Tensor) -> Tensor:
        """The direction of the update, with the new mean squares of its rows. matrix: from all parts."""
        if self._beta2 is None:
            return orthogonalize(matrix, self._coefficients)
        columns = matrix.shape[1] - self._owners.extra
        orthogonal = orthogonalize(matrix[:, :columns], self._coefficients)
        squares = scale_rows_(orthogonal, unpacked(matrix[:, columns:], self._wide), self._beta2)
        return torch.cat((orthogonal, packed(squares, self._dtype)), 1)

    def _squares(self, matrix: Matrix) -> Tensor:
        """This rank's part of the mean squares of the rows."""
        return matrix.part_of(local_part(self.state[self._parameters[matrix.parameter][0]]["row_squares"]))

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
        """Update this rank's part of the weights. result: from `_owned`."""
        parameter, group = self._parameters[matrix.parameter]
        if parameter.grad is None:
            return
        weights = matrix.part_of(local_part(parameter))
        if self._beta2 is not None:
            squares, after = self._squares(matrix), unpacked(result[:, weights.shape[1] :], self._wide)
            squares.copy_(torch.where(self._ok, after, squares))
            result = result[:, : weights.shape[1]]
        factor = adjusted(self._adjustment, *matrix.shape)
        update_weights_(weights, result.to(self._wide), group, self._ok, factor)


def packed(squares: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers (rows, 1) as columns of `dtype`: their bytes if it is narrower, so that they are not rounded."""
    return squares.to(dtype) if dtype.itemsize >= squares.itemsize else squares.view(dtype)


def unpacked(columns: Tensor, wide: torch.dtype) -> Tensor:
    """The numbers in `wide`, (rows, 1), that were packed."""
    return columns.to(wide) if columns.itemsize >= wide.itemsize else columns.contiguous().view(wide)


MUON = OptimizerKind(Muon, options=("momentum",), takes_matrices=True, momentum=0.95)
