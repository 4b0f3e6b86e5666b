"""Orthogonalization of a matrix by Newton-Schulz iterations: Jordan et al., "Muon" (2024)."""

import torch
from torch import Tensor

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
