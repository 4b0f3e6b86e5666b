"""Exact sums: the rounding of gradients, its bound, and what a gradient beyond the bound does."""

import math
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.distributed.gradients import connected_mesh
from titanlite.models.watch import parts_of
from titanlite.parallel import digest
from titanlite.parallel.exact import (
    HEAD_ROOM,
    MOST_LOSS,
    ROWS_DIFFER,
    ExactGradients,
    loss_grid,
    on_grid,
    power_of_two,
    squares_of_rows,
)
from titanlite.parallel.mesh import Mesh, ParallelismConfig


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield connected_mesh(ParallelismConfig(dp_shard=1))
    dist.destroy_process_group()


class Product(nn.Module):
    """Its gradient is what forward gets."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def build(mesh: Mesh, rows: int, columns: int, summands: int) -> tuple[Product, ExactGradients]:
    model = Product(rows, columns)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    fully_shard(model, mesh=mesh.device_mesh["dp_replicate", "dp_shard"], mp_policy=policy)
    return model, ExactGradients([model], mesh, summands)


def add(model: Product, *gradients: Tensor) -> None:
    for index, gradient in enumerate(gradients):
        model.set_requires_gradient_sync(index == len(gradients) - 1)  # type: ignore[operator]
        model(gradient).backward()


def gradient_of(model: Product) -> Tensor:
    assert model.weight.grad is not None
    return model.weight.grad.to_local().clone()  # type: ignore[attr-defined]


def measure(model: Product, exact: ExactGradients, *gradients: Tensor) -> None:
    """Run a step, after which it is known how large the gradients are."""
    add(model, *gradients)
    model.zero_grad()
    exact.end_step()


def total_of(model: Product, *gradients: Tensor) -> Tensor:
    """The sum of the gradients, before it is reduced and rounded to float32."""
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    model.set_reshard_after_backward(False)  # type: ignore[operator]
    for gradient in gradients:
        model(gradient).backward()
    total = model.weight.grad
    assert total is not None
    assert total.dtype == torch.float64
    model.weight.grad = None
    return total


def test_a_sum_has_no_order_and_is_close(mesh: Mesh) -> None:
    """Rows of magnitudes from 1 to 2^-30, whose sums in float64 depend on the order of the summands."""
    generator = torch.Generator().manual_seed(0)
    scale = 2.0 ** -torch.arange(0, 32, 2)[:, None]
    summands = [torch.randn(16, 200, generator=generator) * scale * 10.0**power for power in (0, -9, 0, -12)]
    large = 1000 * torch.rand(16, 200, generator=generator) * scale
    every = [*summands, large, -large]
    model, exact = build(mesh, 16, 200, len(every))
    measure(model, exact, *every)
    first, second = total_of(model, *every), total_of(model, *reversed(every))
    assert torch.equal(first, second)
    in_float64 = [sum(each.double() for each in order) for order in (every, every[::-1])]
    assert not torch.equal(*in_float64), "the case is too easy"  # type: ignore[arg-type]
    largest = torch.stack(every).abs().amax((0, 2)).double()
    reference = torch.maximum(largest, largest.max() * 2.0**-ROWS_DIFFER)
    # 3 bits for 6 summands; a power of two is at most twice the magnitude, and rounding is off by half a unit.
    error = (first - torch.stack([each.double() for each in every]).sum(0)).abs().amax(1)
    assert (error <= len(every) * reference * 2.0 ** (3 - 42)).all()


def test_a_gradient_beyond_the_head_room_is_nan_once(mesh: Mesh) -> None:
    model, exact = build(mesh, 2, 3, 1)
    ones = torch.ones(2, 3)
    measure(model, exact, ones)
    for factor, finite in ((2.0 ** (HEAD_ROOM + 2), False), (2.0 ** (HEAD_ROOM + 2), True), (torch.inf, False)):
        model.zero_grad()
        add(model, ones * torch.tensor([[1.0], [factor]]))
        exact.end_step()
        assert gradient_of(model).isfinite().all(1).tolist() == [True, finite]
    assert exact.largest["weight"][1] == pytest.approx(2.0 ** (HEAD_ROOM + 2), rel=0.1), "infinity is no magnitude"


def test_largest_magnitudes_decay_unless_a_row_has_no_gradient(mesh: Mesh) -> None:
    model, exact = build(mesh, 2, 3, 1)
    measure(model, exact, torch.ones(2, 3))
    for _ in range(10):
        model.zero_grad()
        add(model, torch.tensor([[0.5], [0.0]]).expand(2, 3))
        exact.end_step()
    assert exact.largest["weight"].tolist() == pytest.approx([0.99**10, 1.0])


def test_a_digest_is_computed_once_per_step(mesh: Mesh) -> None:
    model, exact = build(mesh, 2, 3, 1)
    with patch.object(digest, "sum_of_bits", wraps=digest.sum_of_bits) as computed:
        first = digest.weights_digest(exact)
        assert digest.weights_digest(exact) == first
        assert computed.call_count == 1
        measure(model, exact, torch.ones(2, 3))
        with torch.no_grad():
            model.weight.add_(1.0)
        assert digest.weights_digest(exact) != first


def test_powers_of_two_are_exact() -> None:
    exponents = torch.arange(-1000, 1001, dtype=torch.int32)
    assert power_of_two(exponents).tolist() == [2.0**exponent for exponent in range(-1000, 1001)]


def test_squares_of_a_row_do_not_depend_on_order_or_other_rows() -> None:
    rows = torch.randn(8, 999, generator=torch.Generator().manual_seed(0)).double() ** 9
    found = squares_of_rows(rows)
    assert torch.equal(found, squares_of_rows(rows.flip(1)))
    assert torch.equal(found, torch.cat([squares_of_rows(row[None]) for row in rows]))
    assert found.tolist() == pytest.approx(rows.square().sum(1).tolist(), rel=1e-10)
    assert not torch.equal(rows.square().sum(1), rows.flip(1).square().sum(1)), "the case is too easy"
    rows[3, 5] = torch.nan
    assert squares_of_rows(rows).isnan().tolist() == [row == 3 for row in range(8)]


def test_parts_of_values_of_any_magnitude_add_up_in_any_order() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)).double() ** 15
    parts = parts_of(values)
    assert torch.equal(parts.sum(1), parts.flip(1).cumsum(1)[:, -1])
    assert parts.sum(1).sum().item() == pytest.approx(math.fsum(values.tolist()), rel=1e-15)
    assert values.sum() != values.flip(0).cumsum(0)[-1], "the case is too easy"


def test_losses_on_a_grid_add_up_in_any_order() -> None:
    losses = torch.rand(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2048 * MOST_LOSS
    rounded = on_grid(losses, loss_grid(4096 * 2048))
    assert rounded.sum() == rounded.flip(0).sum() == sum(rounded.tolist())
    assert rounded.tolist() == pytest.approx(losses.tolist(), rel=0, abs=1e-5)
    assert losses.sum() != losses.flip(0).sum(), "the case is too easy"
