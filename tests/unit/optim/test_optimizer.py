"""Formulas of the optimizers, and updates that are skipped on the device."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.optim.building import PLAN, optimizer_of
from titanlite.optim.optimizer import GatedOptimizer, OptimizerConfig, without_compiler
from titanlite.optim.registry import check_optimizer, check_parameters, memory_bytes
from titanlite.runtime.errors import Problem

KINDS = {
    "AdamW": OptimizerConfig(lr=0.1),
    "AdamW, bfloat16": OptimizerConfig(lr=0.1, state_dtype="bfloat16"),
    "SGD": OptimizerConfig(name="SGD", lr=0.1),
    "SGD with momentum": OptimizerConfig(name="SGD", lr=0.1, momentum=0.9),
    "Lion": OptimizerConfig(name="Lion", lr=0.1),
    "Muon": OptimizerConfig(name="Muon", lr=0.1),
}


def small_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    modules = {"wq": nn.Linear(4, 4), "norm": nn.RMSNorm(4)}
    return nn.ModuleDict({"block": nn.ModuleDict(modules)}).to(dtype)


def build(kind: str) -> tuple[nn.Module, GatedOptimizer]:
    model = small_model()
    return model, optimizer_of(model, KINDS[kind])


def set_gradients(model: nn.Module, value: float) -> None:
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(number)
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = (value + 0.1 * noise).to(parameter.dtype)


def snapshot(model: nn.Module, optimizer: GatedOptimizer) -> dict[str, Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(optimizer.named_state())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_update_changes_neither_weights_nor_state(kind: str) -> None:
    model, optimizer = build(kind)
    control, control_optimizer = build(kind)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    set_gradients(model, math.nan)
    optimizer.step_if(torch.tensor(False))
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    for one, one_optimizer in ((model, optimizer), (control, control_optimizer)):
        set_gradients(one, 0.5)
        one_optimizer.step_if(torch.tensor(True))
    before = snapshot(model, optimizer)
    assert_same(before, snapshot(control, control_optimizer))
    assert not any(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    set_gradients(model, math.inf)
    optimizer.step_if(torch.tensor(False))
    assert_same(before, snapshot(model, optimizer))


class HostReads(TorchDispatchMode):
    """Counts the values that the host reads."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def torchs(kind: type[torch.optim.Optimizer], **options: Any) -> tuple[nn.Module, GatedOptimizer]:
    """An optimizer of torch as a plugin has it, which cannot skip an update by itself."""
    model = small_model()
    return model, GatedOptimizer([kind(model.named_parameters(), lr=0.1, **options)])


@pytest.mark.parametrize("kind", ["AdamW", "Muon", "Lion", "AdamW, bfloat16", "torch's for-loop"])
def test_the_host_reads_nothing(kind: str) -> None:
    plain = kind == "torch's for-loop"
    model, optimizer = torchs(torch.optim.AdamW, foreach=False) if plain else build(kind)
    for _ in range(2):
        set_gradients(model, 0.5)
        with HostReads() as found:
            optimizer.step_if(torch.tensor(True))
        assert (found.count > 0) == plain


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_without_a_gradient_stays(kind: str) -> None:
    model, optimizer = build(kind)
    set_gradients(model, 0.5)
    optimizer.step_if(torch.tensor(True))
    before = snapshot(model, optimizer)
    optimizer.zero_grad()
    optimizer.step_if(torch.tensor(True))
    assert_same(before, snapshot(model, optimizer))


def test_moments_in_bfloat16_give_almost_the_same_weights() -> None:
    results = []
    for kind in ("AdamW", "AdamW, bfloat16"):
        model, optimizer = build(kind)
        optimizer.set_lr(0.01)
        for step in range(3):
            set_gradients(model, 0.3 + step)
            optimizer.step_if(torch.tensor(True))
        results.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*results, rtol=0, atol=1e-3)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sgd_has_the_bits_of_its_foreach_form(dtype: torch.dtype, momentum: float) -> None:
    weights = []
    section = OptimizerConfig(name="SGD", lr=0.1, momentum=momentum, weight_decay=0.2, weight_decay_skip=())
    for is_plain in (True, False):
        model = small_model(dtype)
        optimizer = optimizer_of(model, section).optimizers[0]
        if is_plain:
            options = {"lr": 0.1, "momentum": momentum, "weight_decay": 0.2}
            optimizer = torch.optim.SGD(model.parameters(), **options, foreach=True)
        for step in range(3):
            set_gradients(model, 0.3 + step)
            optimizer.step()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*weights)


def test_adamw_matches_the_formula() -> None:
    """Every value differs from torch's default and ours, so that an ignored value shows."""
    section = OptimizerConfig(lr=0.05, beta1=0.7, beta2=0.6, eps=0.3, weight_decay=0.2, weight_decay_skip=("*.bias",))
    model = small_model()
    optimizer = optimizer_of(model, section)
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    first = second = 0.0
    for step, gradient in enumerate((0.5, -0.2, 0.9), start=1):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step_if(torch.tensor(True))
        first = 0.7 * first + 0.3 * gradient
        second = 0.6 * second + 0.4 * gradient**2
        direction = first / (1 - 0.7**step) / (math.sqrt(second / (1 - 0.6**step)) + 0.3)
        for name, weight in expected.items():
            weight.mul_(1.0 - 0.05 * (0.0 if name == "block.wq.bias" else 0.2)).sub_(0.05 * direction)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_lion_matches_the_formula(dtype: torch.dtype) -> None:
    section = OptimizerConfig(name="Lion", lr=0.05, beta1=0.7, beta2=0.6, weight_decay=0.2, weight_decay_skip=())
    model = small_model(dtype)
    optimizer = optimizer_of(model, section)
    wide = torch.promote_types(dtype, torch.float32)
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    momentum = {name: torch.zeros_like(weight) for name, weight in expected.items()}
    for gradient in (0.5, -0.2, 0.9):
        set_gradients(model, gradient)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradients, before = parameter.grad.to(wide), momentum[name].to(wide)
            sign = torch.sign(0.7 * before + 0.3 * gradients)
            expected[name] = (expected[name].to(wide) * (1.0 - 0.05 * 0.2) - 0.05 * sign).to(dtype)
            momentum[name] = (0.6 * before + 0.4 * gradients).to(dtype)
        optimizer.step_if(torch.tensor(True))
    bound = {"rtol": 1e-13, "atol": 1e-15} if dtype == torch.float64 else {"rtol": 0.0, "atol": 4e-3}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], **bound)
        torch.testing.assert_close(dict(optimizer.named_state())[f"{name}/momentum"], momentum[name], **bound)


def test_momentum_of_sgd_matches_the_formula() -> None:
    section = OptimizerConfig(name="SGD", lr=0.05, momentum=0.7, weight_decay=0.2, weight_decay_skip=())
    model = small_model()
    optimizer = optimizer_of(model, section)
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    momentum = {name: torch.zeros_like(weight) for name, weight in expected.items()}
    for gradient in (0.5, -0.2, 0.9):
        set_gradients(model, gradient)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            momentum[name] = 0.7 * momentum[name] + parameter.grad + 0.2 * expected[name]
            expected[name] -= 0.05 * momentum[name]
        optimizer.step_if(torch.tensor(True))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_without_the_compiler_is_torchs(kind: type[torch.optim.Optimizer]) -> None:
    """The same bits; gradients are on outside of the step, and off inside."""
    weights = []
    for each in (kind, without_compiler(kind)):
        model = small_model()
        optimizer = each(model.parameters(), lr=0.1, fused=True)
        for step in range(3):
            set_gradients(model, 0.3 + step)
            optimizer.step()
            optimizer.zero_grad()
        assert torch.is_grad_enabled()
        assert all(parameter.grad is None for parameter in model.parameters())
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.slow
def test_an_update_does_not_import_the_compiler() -> None:
    """In a process of its own. Importing it takes 0.6 seconds of CPU time."""
    program = """
import sys, torch
from tests.unit.optim.test_optimizer import KINDS, build, set_gradients
for kind in KINDS:
    model, optimizer = build(kind)
    set_gradients(model, 0.5)
    optimizer.step_if(torch.tensor(True))
    optimizer.zero_grad()
    assert "torch._dynamo" not in sys.modules, kind
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_planned_bytes_of_the_state_are_those_of_a_step(kind: str, dtype: torch.dtype) -> None:
    model = small_model(dtype)
    optimizer = optimizer_of(model, KINDS[kind])
    set_gradients(model, 0.5)
    optimizer.step_if(torch.tensor(True))
    expected = sum(tensor.nbytes for _, tensor in optimizer.named_state())
    named = dict(model.named_parameters())
    state, update = memory_bytes(KINDS[kind], named, PLAN)
    assert state == expected
    # that of Muon depends on the mesh: tests/distributed/test_plan_memory.py
    assert (update > 0) == (kind not in ("AdamW", "Muon"))


def test_sgd_adds_the_decay_to_the_gradient() -> None:
    section = OptimizerConfig(name="SGD", lr=0.05, weight_decay=0.2, weight_decay_skip=("*.bias",))
    model = small_model()
    optimizer = optimizer_of(model, section)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step_if(torch.tensor(True))
    for name, parameter in model.named_parameters():
        decay = 0.0 if name == "block.wq.bias" else 0.2 * before[name]
        torch.testing.assert_close(parameter.detach(), before[name] - 0.05 * (0.5 + decay), rtol=1e-13, atol=1e-15)


def problems_of(section: OptimizerConfig, dtype: torch.dtype = torch.float32) -> list[Problem]:
    named = dict(small_model().named_parameters())
    return [*check_optimizer(section), *check_parameters(section, named, PLAN, dtype)]


def test_edges_of_the_ranges_are_valid() -> None:
    assert problems_of(OptimizerConfig(beta1=0.0, beta2=0.0, weight_decay=0.0)) == []
    assert problems_of(OptimizerConfig(beta2=0.99, state_dtype="bfloat16")) == []


@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        (OptimizerConfig(name="SGD", state_dtype="bfloat16"), "state_dtype", "only with AdamW"),
        (
            OptimizerConfig(beta2=0.995, state_dtype="bfloat16", state_rounding="nearest"),
            "state_rounding",
            "never falls",
        ),
        (OptimizerConfig(momentum=0.9), "momentum", "not with AdamW"),
        (OptimizerConfig(newton_schulz_coefficients=(1.0, 2.0)), "newton_schulz_coefficients", "three numbers"),
    ],
)
def test_combinations_that_do_not_work_are_refused(section: OptimizerConfig, key: str, words: str) -> None:
    (problem,) = problems_of(section)
    assert problem.key == f"optimizer.{key}"
    assert words in problem.rule


def test_a_large_beta2_is_valid_with_stochastic_rounding() -> None:
    assert problems_of(OptimizerConfig(beta2=0.999, state_dtype="bfloat16")) == []


def test_moments_of_bfloat16_parameters_have_the_same_limit() -> None:
    (problem,) = problems_of(OptimizerConfig(beta2=0.995), torch.bfloat16)
    assert problem.key == "optimizer.beta2"
    assert 'optimizer.state_dtype = "bfloat16"' in problem.remedy
    for valid in (OptimizerConfig(beta2=0.99), OptimizerConfig(beta2=0.999, state_dtype="bfloat16")):
        assert problems_of(valid, torch.bfloat16) == []
    assert problems_of(OptimizerConfig(name="Lion", beta2=0.995), torch.bfloat16) == []
