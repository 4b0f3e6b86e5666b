"""Optimizer state created before the first update: the same as torch's, and without effect on training."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from tests.unit.optim.building import optimizer_of
from titanlite.optim.optimizer import GatedOptimizer, OptimizerConfig

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def build(dtype: torch.dtype, *, name: str = "AdamW") -> tuple[nn.Module, GatedOptimizer]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"wq": nn.Linear(4, 3), "norm": nn.RMSNorm(4)})
    model.to(dtype)
    model["wq"].weight.data = model["wq"].weight.data.T.contiguous().T  # the moments have the parameter's strides
    section = OptimizerConfig(name=name, lr=0.1)
    return model, optimizer_of(model, section)


def train(model: nn.Module, optimizer: GatedOptimizer, steps: Iterable[int], *, ok: bool = True) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step_if(torch.tensor(ok))


def described(optimizer: GatedOptimizer) -> dict[str, tuple[object, ...]]:
    return {
        name: (type(value), tuple(value.shape), value.dtype, value.device, value.stride())
        for name, value in optimizer.named_state()
    }


def all_tensors(model: nn.Module, optimizer: GatedOptimizer) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()} | dict(optimizer.named_state())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_state_is_the_same_as_that_of_torch(dtype: torch.dtype) -> None:
    _, ahead = build(dtype)
    assert described(ahead) == {}
    ahead.init_state()
    model, at_the_first_step = build(dtype)
    train(model, at_the_first_step, [1])
    assert described(ahead) == described(at_the_first_step)
    assert len(described(ahead)) == 3 * 3
    assert all(not value.any() for _, value in ahead.named_state())


@pytest.mark.parametrize("dtype", DTYPES)
def test_training_is_the_same_bit_for_bit(dtype: torch.dtype) -> None:
    with_state, without = build(dtype), build(dtype)
    with_state[1].init_state()
    for model, optimizer in (with_state, without):
        train(model, optimizer, [0], ok=False)
        train(model, optimizer, [1, 2, 3])
    ahead, other = all_tensors(*with_state), all_tensors(*without)
    assert ahead.keys() == other.keys()
    for name, tensor in ahead.items():
        assert torch.equal(tensor, other[name]), name


def test_existing_state_is_not_replaced() -> None:
    model, optimizer = build(torch.float32)
    train(model, optimizer, [1, 2])
    before = {name: (value, value.clone()) for name, value in optimizer.named_state()}
    optimizer.init_state()
    for name, value in optimizer.named_state():
        assert value is before[name][0]
        assert torch.equal(value, before[name][1])
