"""Stochastic rounding: right on average, between the two neighbors, and the same for every part of a tensor."""

import pytest
import torch
from torch import nn

from tests.unit.optim.building import optimizer_of
from titanlite.optim import rounding
from titanlite.optim.optimizer import OptimizerConfig
from titanlite.optim.rounding import round_to_bfloat16

STEP = torch.tensor(3.0)


def rounded(values: torch.Tensor, seed: int = 0, step: torch.Tensor = STEP, name: str = "w") -> torch.Tensor:
    (found,) = round_to_bfloat16([values], seed, step, name, values.shape, (0,) * values.dim())
    return found


@pytest.mark.parametrize("value", [1.0 + 1 / 1024, -3.3e-9, 7.7e20, 1e-39])
def test_values_are_right_on_average(value: float) -> None:
    values = torch.full((400, 500), value)
    found = rounded(values)
    assert found.dtype == torch.bfloat16
    low, high = found.min().item(), found.max().item()
    assert low <= value <= high
    assert len(found.unique()) == 2
    gap = high - low
    # the standard error of 200,000 draws is at most 0.0011 gaps
    assert abs(found.double().mean().item() - value) < 0.006 * gap


def test_values_of_bfloat16_stay() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, 3e38, float("inf")])
    assert torch.equal(rounded(values), values.to(torch.bfloat16))


def test_draws_depend_on_seed_step_name_and_element_only() -> None:
    values = torch.full((60, 50), 1.001)
    first = rounded(values)
    assert torch.equal(first, rounded(values))
    for other in (rounded(values, seed=1), rounded(values, step=torch.tensor(4.0)), rounded(values, name="v")):
        assert 0.1 < (first != other).float().mean() < 0.4


def test_a_part_is_rounded_as_in_the_full_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(6, 7, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    full = rounded(values)
    monkeypatch.setattr(rounding, "CHUNKS", {"cpu": 17})
    assert torch.equal(rounded(values), full)
    for rows, columns, depth in ((slice(2, 5), slice(0, 7), slice(0, 8)), (slice(0, 6), slice(3, 4), slice(5, 8))):
        part = values[rows, columns, depth]
        offset = (rows.start, columns.start, depth.start)
        (found,) = round_to_bfloat16([part], 0, STEP, "w", values.shape, offset)
        assert torch.equal(found, full[rows, columns, depth])


def test_tensors_are_rounded_independently() -> None:
    values = torch.full((200, 500), 1.0 + 1 / 256)
    found = torch.stack(round_to_bfloat16([values] * 4, 0, STEP, "w", values.shape, (0, 0))).view(4, -1)
    correlations = torch.corrcoef((found > 1).double()) - torch.eye(4, dtype=torch.float64)
    assert correlations.abs().max() < 0.02  # the standard error is 0.003
    assert torch.equal(found[0], rounded(values).view(-1))


@pytest.mark.slow
@pytest.mark.parametrize(("rounding_of", "falls"), [("stochastic", True), ("nearest", False)])
def test_a_second_moment_falls_only_with_stochastic_rounding(rounding_of: str, falls: bool) -> None:
    """With beta2 = 0.999 and gradients of 0, it must fall to 0.999^1000 = 0.37 of itself."""
    parameter = nn.ModuleDict({"w": nn.Linear(32, 32, bias=False)})
    section = OptimizerConfig(beta2=0.999, state_dtype="bfloat16", state_rounding=rounding_of)  # type: ignore[arg-type]
    optimizer = optimizer_of(parameter, section)
    optimizer.init_state()
    moment = dict(optimizer.named_state())["w.weight/exp_avg_sq"]
    moment.fill_(1.0)
    for _ in range(1000):
        parameter["w"].weight.grad = torch.zeros(32, 32)
        optimizer.step_if(torch.tensor(True))
    mean = moment.float().mean().item()
    assert mean == pytest.approx(0.3677, rel=0.01) if falls else mean == 1.0
