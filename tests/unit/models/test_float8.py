"""Float8: the cast and the scales against ml_dtypes, products and gradients against full tensors in NumPy."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from titanlite.models.float8 import RECIPES, Float8, Recipe, RecipeName, Scale, e4m3, rounded, scales
from titanlite.models.linear import multiplied

CODES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
FINITE = np.unique(CODES[np.isfinite(CODES)])
ON_CPU = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")
"""Whether torch has float8 products on CPUs: 2.11 does not."""
Array = Any


def test_numbers_of_e4m3_stay() -> None:
    assert len(FINITE) == 253  # of 256: two are NaN, and zero has two signs
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(
            e4m3(torch.tensor(CODES, dtype=dtype)).nan_to_num(nan=-1),
            torch.tensor(CODES, dtype=dtype).nan_to_num(nan=-1),
        )


def test_numbers_between_are_rounded_once_ties_to_even() -> None:
    ties = (FINITE[1:] + FINITE[:-1]) / 2
    near = np.concatenate([ties, ties * (1 + 2**-20), ties * (1 - 2**-20), FINITE * 1.01])
    near = near[np.abs(near) <= 448]
    expected = near.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    for dtype in (torch.float32, torch.float64):
        assert np.array_equal(e4m3(torch.tensor(near, dtype=dtype)).double().numpy(), expected)
    # Closer to a tie than float32 can tell: a cast through float32 would round to even.
    above, below = np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)
    assert np.array_equal(e4m3(torch.tensor(above)).numpy(), FINITE[1:])
    assert np.array_equal(e4m3(torch.tensor(below)).numpy(), FINITE[:-1])


@pytest.mark.parametrize(
    ("value", "expected"),
    [(448.1, 448.0), (1e30, 448.0), (-500.0, -448.0), (2.0**-10, 0.0), (1e-300, 0.0), (torch.nan, torch.nan)],
)
def test_numbers_outside_of_the_range(value: float, expected: float) -> None:
    found = e4m3(torch.tensor(value, dtype=torch.float64)).item()
    assert found == pytest.approx(expected, abs=0, nan_ok=True)


@pytest.mark.parametrize(
    ("largest", "ceil", "floor"),
    [
        (448.0, 1.0, 1.0),
        (np.nextafter(448.0, 512.0), 2.0, 1.0),
        (512.0, 2.0, 2.0),
        (256.0, 1.0, 1.0),
        (3.5, 2.0**-7, 2.0**-7),
        (3.6, 2.0**-6, 2.0**-7),
        (0.0, 1.0, 1.0),
        (1e-300, 2.0**-126, 2.0**-126),
        (torch.inf, torch.nan, torch.nan),
        (torch.nan, torch.nan, torch.nan),
    ],
)
def test_scales(largest: float, ceil: float, floor: float) -> None:
    exact = max(largest / 448, 2.0**-126) if largest else 1.0
    expected = {"ceil": ceil, "floor": floor, "float32": exact if np.isfinite(largest) else torch.nan}
    for rule, scale in expected.items():
        found = scales(torch.tensor(largest, dtype=torch.float64), rule).item()  # type: ignore[arg-type]
        assert found == pytest.approx(scale, rel=0, abs=0, nan_ok=True), rule


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_an_element_that_is_not_finite_reaches_the_result(value: float, dtype: torch.dtype) -> None:
    """Also with the products of a device: a CPU has those of rows."""
    x, weight = torch.ones(1, 2, 128, dtype=dtype), torch.ones(128, 128, dtype=dtype)
    x[0, 1, 40] = value
    for recipe in RECIPES.values():
        for on_device in (False, True) if recipe.block == 0 and dtype != torch.float64 and ON_CPU else (False,):
            product = multiplied(x, weight, products=Float8(recipe, "ceil", on_device=on_device))
            assert product[0, 0].isfinite().all()
            assert product[0, 1].isnan().all()


def test_zeros_stay_zero() -> None:
    assert not rounded(torch.zeros(2, 64), 1, 32, "float32").any()


def test_scales_are_those_of_the_weight_now() -> None:
    """Also after a step of the optimizer, which changes the weight in place."""
    x, weight = torch.randn(1, 4, 64), torch.randn(32, 64)
    before = multiplied(x, weight, products=Float8(RECIPES["mxfp8"], "ceil"))
    weight *= 1024
    assert torch.equal(multiplied(x, weight, products=Float8(RECIPES["mxfp8"], "ceil")), 1024 * before)


def in_numpy(x: Array, rows: int, columns: int) -> Array:
    """As `rounded` with powers of two, in a loop over blocks."""
    out, (height, width) = np.empty_like(x), x.shape
    rows, columns = rows or height, columns or width
    for row in range(0, height, rows):
        for column in range(0, width, columns):
            place = np.s_[row : row + rows, column : column + columns]
            factor = 2.0 ** np.ceil(np.log2(np.abs(x[place]).max() / 448))
            out[place] = (x[place] / factor).astype(np.float32).astype(ml_dtypes.float8_e4m3fn) * factor
    return out


RECIPE_BLOCKS: dict[RecipeName, Any] = {
    "mxfp8": {"x": (1, 32), "w": (1, 32), "dy": (1, 32), "w_backward": (32, 1), "of_tokens": (32, 1)},
    "blockwise": {"x": (1, 128), "w": (128, 128), "dy": (1, 128), "w_backward": (128, 128), "of_tokens": (128, 1)},
    "rowwise": {"x": (1, 0), "w": (1, 0), "dy": (1, 0), "w_backward": (0, 1), "of_tokens": None},
}
"""Of each operand, as in docs/numerics.md: rows and columns of a block."""


@pytest.mark.parametrize("name", RECIPES)
def test_products_and_gradients(name: RecipeName) -> None:
    """Blocks of two rows of 128 positions; no block has positions of both."""
    blocks, generator = RECIPE_BLOCKS[name], torch.Generator().manual_seed(0)
    draw: Callable[..., Tensor] = lambda *shape: torch.randn(shape, generator=generator).double()  # noqa: E731
    x, weight = draw(2, 128, 256).requires_grad_(), draw(128, 256).requires_grad_()
    dy = draw(2, 128, 128) * torch.logspace(-3, 3, 256).view(2, 128, 1)  # rows differ, so that their scales do
    product = multiplied(x, weight, products=Float8(RECIPES[name], "ceil"))
    product.backward(dy)
    assert x.grad is not None
    assert weight.grad is not None
    w, of_weight = weight.detach().numpy(), np.zeros((128, 256))
    for row in range(2):
        xs, dys = x.detach()[row].numpy(), dy[row].numpy()
        forward = in_numpy(xs, *blocks["x"]) @ in_numpy(w, *blocks["w"]).T
        np.testing.assert_allclose(product[row].detach().numpy(), forward, rtol=1e-12, atol=1e-12)
        backward = in_numpy(dys, *blocks["dy"]) @ in_numpy(w, *blocks["w_backward"])
        np.testing.assert_allclose(x.grad[row].numpy(), backward, rtol=1e-12, atol=1e-9)
        if blocks["of_tokens"]:
            xs, dys = (in_numpy(each, *blocks["of_tokens"]) for each in (xs, dys))
        of_weight += dys.T @ xs
    np.testing.assert_allclose(weight.grad.numpy(), of_weight, rtol=1e-12, atol=1e-9)


@pytest.mark.skipif(not ON_CPU, reason="torch has no float8 products on CPUs in this version")
@pytest.mark.parametrize("scale", ["floor", "float32"])
def test_products_of_a_device_are_the_emulated_ones(scale: Scale) -> None:
    """On a CPU torch multiplies rows of float8, too."""
    found = []
    for on_device in (False, True):
        generator = torch.Generator().manual_seed(0)
        x, weight, dy = (torch.randn(shape, generator=generator) for shape in ((2, 5, 64), (32, 64), (2, 5, 32)))
        x[0, 0], x[0, 1] = 0, x[0, 1] * 1e30
        x, weight = x.requires_grad_(), weight.requires_grad_()
        settings = Float8(RECIPES["rowwise"], scale, on_device=on_device)
        product = multiplied(x, weight, products=settings)
        found.append((product, *torch.autograd.grad(product, [x, weight], dy)))
    for emulated, by_device in zip(*found, strict=True):
        torch.testing.assert_close(by_device, emulated, rtol=1e-5, atol=1e-5)


def test_a_bias_is_added_and_the_dtype_stays() -> None:
    x, weight, bias = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((1, 32, 64), (32, 64), (32,)))
    product = multiplied(x, weight, bias, products=Float8(RECIPES["mxfp8"], "ceil"))
    product.sum().backward()
    assert product.dtype == torch.bfloat16
    assert torch.equal(bias.grad, torch.full((32,), 32.0).bfloat16())  # type: ignore[arg-type]
    assert [each.grad.dtype for each in (x, weight) if each.grad is not None] == [torch.bfloat16] * 2


def test_each_gradient_is_computed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by pipeline schedules that compute those of the inputs first: no operand is rounded twice."""
    shapes: list[tuple[int, ...]] = []

    def noted(x: Tensor, *arguments: Any) -> Tensor:
        shapes.append(tuple(x.shape))
        return rounded(x, *arguments)

    x, weight = torch.randn(1, 32, 64, requires_grad=True), torch.randn(96, 64, requires_grad=True)
    product = multiplied(x, weight, products=Float8(RECIPES["mxfp8"], "ceil"))
    monkeypatch.setattr("titanlite.models.float8.rounded", noted)
    torch.autograd.grad(product, [x], torch.ones_like(product), retain_graph=True)
    assert shapes == [(1, 32, 96), (64, 96)]
    torch.autograd.grad(product, [weight], torch.ones_like(product))
    assert shapes[2:] == [(1, 32, 96), (1, 32, 64)]


def test_rows_without_elements() -> None:
    """Those of an expert that no position has chosen."""
    weight = torch.randn(32, 64, requires_grad=True)
    for recipe in (RECIPES["rowwise"], Recipe(block=32, of_tokens=False)):
        multiplied(torch.randn(0, 64), weight, products=Float8(recipe, "ceil")).sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()
