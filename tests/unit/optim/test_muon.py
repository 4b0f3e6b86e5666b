"""Muon: the formula in plain torch, torch's own Muon, and the precision of the orthogonalization."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.unit.optim.building import STRUCTURE, optimizer_of
from titanlite.optim.muon import orthogonalize
from titanlite.optim.optimizer import OptimizerConfig

COEFFICIENTS = (3.0, -3.2, 1.2)
STEPS = 4
PUBLISHED = (3.4445, -4.775, 2.0315)


def model_of(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    block = nn.ModuleDict({"wide": nn.Linear(24, 9), "tall": nn.Linear(7, 20, bias=False)})
    block.register_parameter("experts", nn.Parameter(torch.randn(3, 6, 5)))
    block["router"] = nn.Linear(6, 4, bias=False)
    return nn.ModuleDict({"block": block, "output": nn.Linear(6, 8, bias=False)}).to(dtype)


def set_gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def plain_orthogonalization(matrix: Tensor) -> Tensor:
    """By singular values: an iteration maps each of them by the polynomial a s + b s^3 + c s^5."""
    a, b, c = COEFFICIENTS
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(STEPS):
        values = a * values + b * values**3 + c * values**5
    return left @ values.diag() @ right


@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original"])
def test_the_update_matches_the_formula(adjust_lr: str) -> None:
    section = OptimizerConfig(
        name="Muon",
        lr=0.05,
        momentum=0.7,
        weight_decay=0.3,
        weight_decay_skip=("*tall*",),
        newton_schulz_steps=STEPS,
        newton_schulz_coefficients=COEFFICIENTS,
        adjust_lr=adjust_lr,  # type: ignore[arg-type]
    )
    model = model_of()
    optimizer = optimizer_of(model, section)
    names = ["block.wide.weight", "block.tall.weight", "block.experts"]
    expected = {name: dict(model.named_parameters())[name].detach().clone() for name in names}
    momentum = {name: torch.zeros_like(weight) for name, weight in expected.items()}
    for step in range(3):
        gradients = set_gradients(model, step)
        for name, weight in expected.items():
            momentum[name] = 0.7 * momentum[name] + 0.3 * gradients[name]
            direction = 0.3 * gradients[name] + 0.7 * momentum[name]
            found = [plain_orthogonalization(each) for each in (direction if direction.dim() == 3 else direction[None])]
            rows, columns = weight.shape[-2:]
            factor = (
                0.2 * math.sqrt(max(rows, columns)) if adjust_lr != "original" else math.sqrt(max(1, rows / columns))
            )
            decay = 0.0 if "tall" in name else 0.3
            expected[name] = weight * (1 - 0.05 * decay) - 0.05 * factor * torch.stack(found).view(weight.shape)
        optimizer.step_if(torch.tensor(True))
    for name, weight in expected.items():
        torch.testing.assert_close(dict(model.named_parameters())[name].detach(), weight, rtol=0, atol=1e-13)
        torch.testing.assert_close(
            dict(optimizer.named_state())[f"{name}/momentum"], momentum[name], rtol=0, atol=1e-14
        )


@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original"])
def test_an_update_is_torchs_within_the_precision_of_bfloat16(adjust_lr: str) -> None:
    """torch.optim.Muon computes the orthogonalization in bfloat16."""
    section = OptimizerConfig(name="Muon", lr=0.05, weight_decay=0.1, adjust_lr=adjust_lr)  # type: ignore[arg-type]
    model, other = model_of(), model_of()
    optimizer = optimizer_of(model, section, STRUCTURE)
    weights = {name: dict(other.named_parameters())[name] for name in ("block.wide.weight", "block.tall.weight")}
    torchs = torch.optim.Muon(weights.values(), lr=0.05, weight_decay=0.1, momentum=0.95, adjust_lr_fn=adjust_lr)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    for step in range(3):
        set_gradients(model, step)
        set_gradients(other, step)
        optimizer.step_if(torch.tensor(True))
        torchs.step()
    for name, weight in weights.items():
        own = dict(model.named_parameters())[name].detach() - before[name]
        error = (own - (weight.detach() - before[name])).norm() / own.norm()
        assert 1e-4 < error < 3e-2


@pytest.mark.parametrize(
    ("dtype", "bounds"), [(torch.float32, (1e-4, 1e-4, 1e-4)), (torch.bfloat16, (0.02, 0.08, 0.3))]
)
@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (256, 64), pytest.param((1024, 1024), marks=pytest.mark.soak)])
def test_rounding_of_the_orthogonalization(
    dtype: torch.dtype, bounds: tuple[float, ...], shape: tuple[int, int]
) -> None:
    """The bounds are those of docs/numerics.md. The k-th singular value is divided by k^d."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    for exponent, bound in enumerate(bounds):
        falling = values * torch.arange(1, len(values) + 1, dtype=torch.float64) ** -exponent
        matrix = left * falling @ right
        exact = orthogonalize(matrix, 5, PUBLISHED)
        found = orthogonalize(matrix.to(dtype), 5, PUBLISHED)
        assert found.dtype == dtype
        error = ((found.double() - exact).norm() / exact.norm()).item()
        print(f"| {dtype} | {shape} | {exponent} | {error:.1e} |")
        assert error < bound


def test_a_lower_precision_is_a_choice() -> None:
    models = []
    for name in ("auto", "float64", "bfloat16"):
        model = model_of()
        optimizer = optimizer_of(model, OptimizerConfig(name="Muon", newton_schulz_dtype=name))  # type: ignore[arg-type]
        set_gradients(model, 0)
        optimizer.step_if(torch.tensor(True))
        models.append(dict(model.named_parameters())["block.wide.weight"].detach())
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])
