"""Linear layers whose matrix products have operands in float8, with scales that do not depend on the layout.

Each element of an operand is rounded to E4M3 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022) times the
scale of its block. The product of these numbers is that of the device, or emulated in promote_types(dtype, float32).
Blocks belong to the full tensor, never to the part of it that a rank has: see RECIPES.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType

LARGEST = 448.0
"""The largest number of E4M3."""
UNIT = 16
"""Sizes of weights that torch's scaled_mm multiplies are multiples of this."""
RecipeName = Literal["mxfp8", "blockwise", "rowwise"]
Scale = Literal["ceil", "floor", "float32"]
Maximum = Callable[[Tensor], Tensor]
ProductName = Literal["output", "input gradient", "weight gradient"]


@dataclass(frozen=True)
class Recipe:
    """The blocks of elements that share a scale.

    block: elements along the contraction; 0: all. weight_rows: of a weight also across the contraction. of_tokens:
    whether the weight gradient has float8 operands, with blocks of positions, else it has the compute dtype.
    """

    block: int
    weight_rows: int = 1
    of_tokens: bool = True


RECIPES: dict[RecipeName, Recipe] = {
    "mxfp8": Recipe(block=32),
    "blockwise": Recipe(block=128, weight_rows=128),
    "rowwise": Recipe(block=0, of_tokens=False),
}


@dataclass(frozen=True)
class Float8:
    """The Products of a linear layer.

    scale: see scales. maximum, gradient_maximum: the elementwise maximum over the ranks among which the contraction of
    the forward pass, or that of the input gradient, is cut; None: it is not cut. on_device: multiply by the matrix unit
    of the device, for "rowwise" and sizes that are multiples of UNIT; else the product is emulated.
    """

    recipe: Recipe
    scale: Scale
    maximum: Maximum | None = None
    gradient_maximum: Maximum | None = None
    on_device: bool = False

    def maximum_of(self, product: ProductName) -> Maximum | None:
        return self.maximum if product == "output" else self.gradient_maximum

    def operands(self, product: ProductName, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Both operands as float8 represents them, see `rounded`. output: x, weight. input gradient: gradient,
        weight^T. weight gradient: gradient, x. x, gradient: (…, positions, inputs or outputs)."""
        recipe, maximum = self.recipe, self.maximum_of(product)
        if product == "weight gradient":
            return rounded(left, recipe.block, 1, self.scale), rounded(right, recipe.block, 1, self.scale)
        own = rounded(left, 1, recipe.block, self.scale, maximum)
        return own, rounded(right, recipe.weight_rows, recipe.block, self.scale, maximum)

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return float8_product(x, weight, self, "output")

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        return float8_product(gradient, weight.T, self, "input gradient")

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        dtype = x.dtype
        if self.recipe.of_tokens:
            gradient, x = self.operands("weight gradient", gradient, x)
        return (gradient.flatten(0, -2).T @ x.flatten(0, -2)).to(dtype)


def float8_product(x: Tensor, weight: Tensor, settings: Float8, which: ProductName) -> Tensor:
    """x weight^T of operands in float8, contracted along the last dimension of both."""
    if settings.on_device and x.numel() and not any(size % UNIT for size in weight.shape):
        (own, own_scales), (others, scales_of_others) = (
            _scaled_rows(each, settings.scale, settings.maximum_of(which)) for each in (x.flatten(0, -2), weight)
        )
        out: Tensor = functional.scaled_mm(
            *(own, others.T, own_scales, ScalingType.RowWise, scales_of_others.T.contiguous(), ScalingType.RowWise),
            output_dtype=x.dtype,
        )
        return out.view(*x.shape[:-1], len(weight))
    own, others = settings.operands(which, x, weight)
    return (own @ others.T).to(x.dtype)


def _scaled_rows(x: Tensor, scale: Scale, maximum: Maximum | None) -> tuple[Tensor, Tensor]:
    """The rows of x divided by their scales, as float8, and the scales, (rows, 1)."""
    largest = x.abs().amax(dim=-1, keepdim=True).to(torch.float32)
    factor = scales(largest if maximum is None else maximum(largest), scale)
    scaled = (x.to(torch.float32) / factor).clamp(-LARGEST, LARGEST)
    return scaled.to(torch.float8_e4m3fn).contiguous(), factor  # scaled_mm needs rows of adjacent elements


def rounded(x: Tensor, rows: int, columns: int, scale: Scale, maximum: Maximum | None = None) -> Tensor:
    """x, (…, rows, columns), as float8 represents it, in promote_types(x.dtype, float32).

    rows, columns: of a block; 0: all. A block with an element that is not finite becomes NaN, so that the step is
    skipped: a clamp would hide an infinity.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rows, columns = rows or wide.shape[-2], columns or wide.shape[-1]
    blocks = wide.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    largest = blocks.abs().amax(dim=(-3, -1), keepdim=True)
    factor = scales(largest if maximum is None else maximum(largest), scale)
    return (e4m3(blocks / factor) * factor).reshape(wide.shape)


def scales(largest: Tensor, scale: Scale) -> Tensor:
    """The scale of blocks with these largest magnitudes, at least 2^-126; NaN if a magnitude is not finite.

    ceil: the least power of two that keeps the block within E4M3 (NVIDIA's rule: Mishra et al., "Recipes for
    Pre-training LLMs with MXFP8", 2025). floor: half of that, unless the largest element then stays below 512, and is
    clamped ("OCP Microscaling Formats (MX) Specification", version 1.0, 2023). float32: largest / 448.
    """
    if scale == "float32":
        factor = largest / LARGEST
    else:
        factor = power_below(largest) * 2.0**-8
        if scale == "ceil":
            factor = torch.where(largest > factor * LARGEST, factor * 2, factor)
    factor = factor.clamp(min=2.0**-126)  # e8m0 goes to 2^-127, which is no normal number of float32
    return torch.where(largest.isfinite(), factor.where(largest > 0, 1.0), torch.nan)


def e4m3(x: Tensor) -> Tensor:
    """The nearest numbers of E4M3, ties to even, at most 448 in magnitude. float32 or float64; NaN stays NaN.

    Rounded once: torch casts float64 through float32.
    """
    spacing = power_below(x).clamp(min=2.0**-6) * 2.0**-3  # below 2^-6, numbers are subnormal
    return ((x / spacing).round() * spacing).clamp(-LARGEST, LARGEST)


def power_below(x: Tensor) -> Tensor:
    """The largest power of two up to the magnitude of x, by its bits; 0 below the normal numbers."""
    integers, mask = (torch.int32, 0x7F800000) if x.dtype == torch.float32 else (torch.int64, 0x7FF0000000000000)
    return (x.contiguous().view(integers) & mask).view(x.dtype)
