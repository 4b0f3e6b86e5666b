"""Muon: the formula in plain torch, torch's own Muon, and the precision of the orthogonalization."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.unit.optim.building import STRUCTURE, optimizer_of
from titanlite.optim.muon import POLAR_EXPRESS, iterations, orthogonalize, packed, unpacked
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
        exact = orthogonalize(matrix, [PUBLISHED] * 5)
        found = orthogonalize(matrix.to(dtype), [PUBLISHED] * 5)
        assert found.dtype == dtype
        error = ((found.double() - exact).norm() / exact.norm()).item()
        print(f"| {dtype} | {shape} | {exponent} | {error:.1e} |")
        assert error < bound


def best_quintic(least: float, most: float) -> Tensor:
    """The a, b, c with which a x + b x^3 + c x^5 is closest to 1 on an interval, by the algorithm of Remez: the errors
    at its ends and at both extremes inside have one size, and alternate."""
    inside = torch.tensor([0.75 * least + 0.25 * most, 0.25 * least + 0.75 * most], dtype=torch.float64)
    found = torch.zeros(4, dtype=torch.float64)
    for _ in range(50):
        x = torch.tensor([least, *inside, most], dtype=torch.float64)
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        found = torch.linalg.solve(torch.stack((x, x**3, x**5, signs), 1), torch.ones_like(x))
        a, b, c, _ = found
        root = (9 * b**2 - 20 * a * c).sqrt()
        inside = torch.stack(((-3 * b - root) / (10 * c), (-3 * b + root) / (10 * c))).sqrt()
    return found[:3]


def test_the_coefficients_of_polar_express_are_the_best_ones() -> None:
    """Algorithm 2 of the paper, for singular values of at least 0.001; an interval is at least as wide as its ends
    differ by a factor of 41.5, so that no value below it is left behind."""
    cushion, (least, most) = 0.02407327424182761, (1e-3, 1.0)
    for published in POLAR_EXPRESS[:6]:
        found = best_quintic(max(least, cushion * most), most)
        a, b, c = found
        ends = [a * x + b * x**3 + c * x**5 for x in (least, most)]
        found = found * (2 / sum(ends) if least < cushion * most else 1)
        torch.testing.assert_close(found, torch.tensor(published, dtype=torch.float64), rtol=1e-12, atol=0)
        a, b, c = found.tolist()
        least = a * least + b * least**3 + c * least**5
        most = 2 - least


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_polar_express_ends_closer_to_1(dtype: torch.dtype) -> None:
    """Singular values from 0.002 to 1 of a matrix whose Frobenius norm is 1, after five iterations."""
    matrix = torch.randn(48, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = torch.logspace(0, -1.5, 48, dtype=torch.float64)
    matrix = left * values @ right
    spread = {}
    for name in ("newton_schulz", "polar_express"):
        section = OptimizerConfig(name="Muon", orthogonalization=name)  # type: ignore[arg-type]
        found = torch.linalg.svdvals(orthogonalize(matrix.to(dtype), iterations(section)).double())
        spread[name] = (found - 1).abs().max().item()
    print(f"| {dtype} | {spread} |")
    assert spread["polar_express"] < 0.14 < 0.3 < spread["newton_schulz"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_mean_squares_of_rows_travel_without_rounding(dtype: torch.dtype) -> None:
    for wide in (torch.float32, torch.float64):
        squares = torch.rand(5, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(wide)
        columns = torch.cat((torch.zeros(5, 3, dtype=dtype), packed(squares, dtype)), 1)
        assert torch.equal(unpacked(columns[:, 3:], wide), squares)


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
