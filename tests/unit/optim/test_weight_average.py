"""The average of the weights: its formula, skipped steps, dtypes and bytes."""

import pytest
import torch
from torch import Tensor, nn

from titanlite.optim.optimizer import WeightAverage, average_bytes

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
YES, NO = torch.tensor(True), torch.tensor(False)


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in (("w", (5, 3)), ("norm", (4,)))}


@torch.no_grad()
def change(named: dict[str, nn.Parameter]) -> None:
    for parameter in named.values():
        parameter.add_(torch.randn_like(parameter))


def bits(tensors: dict[str, Tensor]) -> list[list[int]]:
    return [tensor.contiguous().view(-1).view(torch.uint8).tolist() for tensor in tensors.values()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", [0.3, 0.9, 0.99999])
def test_it_is_that_of_a_loop_in_float64(dtype: torch.dtype, decay: float) -> None:
    named = parameters(dtype)
    average = WeightAverage(named, decay)
    expected = {name: parameter.detach().to(torch.float64, copy=True) for name, parameter in named.items()}
    assert {name: tensor.dtype for name, tensor in average.tensors.items()} == dict.fromkeys(
        named, torch.promote_types(dtype, torch.float32)
    )
    for _ in range(20):
        change(named)
        average.update_if(YES)
        for name, parameter in named.items():
            expected[name] = decay * expected[name] + (1 - decay) * parameter.detach().double()
    for name, tensor in average.tensors.items():
        rounding = 1e-14 if dtype == torch.float64 else 2e-6
        torch.testing.assert_close(tensor.double(), expected[name], rtol=0, atol=rounding * 20)
        moved = tensor - named[name].detach()
        assert moved.abs().max() > 0.1, "it is not the last weights"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_skipped_step_changes_no_bit(dtype: torch.dtype) -> None:
    named = parameters(dtype)
    with torch.no_grad():
        named["w"][0, 0] = -0.0
    average = WeightAverage(named, 0.9)
    before = bits(average.tensors)
    for value in (1.0, float("nan"), float("inf")):
        with torch.no_grad():
            named["w"].fill_(value)
        average.update_if(NO)
        assert bits(average.tensors) == before
    with torch.no_grad():
        named["w"].fill_(1.0)
    average.update_if(YES)
    assert bits(average.tensors) != before


def test_an_average_of_bfloat16_weights_keeps_small_changes() -> None:
    """Each update changes the average by a thousandth of the difference, which bfloat16 would round away."""
    named = {"w": nn.Parameter(torch.ones(4, dtype=torch.bfloat16))}
    average = WeightAverage(named, 0.999)
    with torch.no_grad():
        named["w"].fill_(2.0)
    for _ in range(1000):
        average.update_if(YES)
    torch.testing.assert_close(average.tensors["w"], torch.full((4,), 2 - 0.999**1000), rtol=1e-4, atol=0)


def test_it_restarts_at_the_present_weights() -> None:
    named = parameters(torch.float32)
    average = WeightAverage(named, 0.9)
    change(named)
    average.update_if(YES)
    average.restart()
    assert bits(average.tensors) == bits({name: parameter.detach() for name, parameter in named.items()})


def test_without_decay_there_is_no_state() -> None:
    average = WeightAverage(parameters(torch.float32), 0.0)
    average.update_if(YES)
    average.restart()
    assert average.tensors == {}
    assert average_bytes(0.0, parameters(torch.float32).values()) == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_those_of_its_tensors(dtype: torch.dtype) -> None:
    sizes = [tensor.nbytes for tensor in WeightAverage(parameters(dtype), 0.9).tensors.values()]
    assert average_bytes(0.9, parameters(dtype).values()) == (sum(sizes), max(sizes))
