"""Parameter groups by name, implementations, and updates that are skipped on the device."""

import math

import pytest
import torch
from torch import Tensor, nn

from titanlite.optim.optimizer import GatedOptimizer, OptimizerConfig, without_compiler
from titanlite.optim.registry import build_optimizer, check_optimizer, state_bytes

CPU = torch.device("cpu")
IMPLEMENTATIONS = [
    ("AdamW", "auto"),
    ("AdamW", "foreach"),
    ("AdamW", "for-loop"),
    ("SGD", "auto"),
    ("SGD", "for-loop"),
]


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"wq": nn.Linear(4, 4), "norm": nn.RMSNorm(4)}).to(torch.float64)


def build(name: str = "AdamW", implementation: str = "auto") -> tuple[nn.Module, GatedOptimizer]:
    model = small_model()
    section = OptimizerConfig(name=name, implementation=implementation, lr=0.1)
    return model, build_optimizer(section, [model], CPU)


def set_gradients(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def snapshot(model: nn.Module, optimizer: GatedOptimizer) -> list[Tensor]:
    state = [value for entry in optimizer.optimizer.state.values() for value in entry.values()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *state)]


def test_norms_and_biases_are_not_decayed() -> None:
    _, optimizer = build()
    groups = {tuple(group["param_names"]): group["weight_decay"] for group in optimizer.optimizer.param_groups}
    assert groups == {("wq.weight",): 0.1, ("wq.bias", "norm.weight"): 0.0}


@pytest.mark.parametrize(("name", "implementation"), IMPLEMENTATIONS)
def test_a_skipped_update_changes_neither_weights_nor_state(name: str, implementation: str) -> None:
    model, optimizer = build(name, implementation)
    control, control_optimizer = build(name, implementation)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    set_gradients(model, float("nan"))
    optimizer.step_if(torch.tensor(False))
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    for one, one_optimizer in ((model, optimizer), (control, control_optimizer)):
        set_gradients(one, 0.5)
        one_optimizer.step_if(torch.tensor(True))
    for left, right in zip(snapshot(model, optimizer), snapshot(control, control_optimizer), strict=True):
        assert torch.equal(left, right)
    before = snapshot(model, optimizer)
    set_gradients(model, float("inf"))
    optimizer.step_if(torch.tensor(False))
    for left, right in zip(before, snapshot(model, optimizer), strict=True):
        assert torch.equal(left, right)


def test_all_implementations_agree() -> None:
    results = {}
    for name, implementation in IMPLEMENTATIONS:
        model, optimizer = build(name, implementation)
        optimizer.set_lr(0.01)
        for step in range(3):
            set_gradients(model, 0.3 + step)
            optimizer.step_if(torch.tensor(True))
        results[name, implementation] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    for (name, _), result in results.items():
        torch.testing.assert_close(result, results[name, "auto"], rtol=1e-13, atol=0)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_adamw_matches_the_formula(implementation: str) -> None:
    """Every value differs from torch's default and ours, so that an ignored value shows."""
    section = OptimizerConfig(
        lr=0.05,
        beta1=0.7,
        beta2=0.6,
        eps=0.3,
        weight_decay=0.2,
        weight_decay_skip=("*.bias",),
        implementation=implementation,
    )
    model = small_model()
    optimizer = build_optimizer(section, [model], CPU)
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    first = second = 0.0
    for step, gradient in enumerate((0.5, -0.2, 0.9), start=1):
        set_gradients(model, gradient)
        optimizer.step_if(torch.tensor(True))
        first = 0.7 * first + 0.3 * gradient
        second = 0.6 * second + 0.4 * gradient**2
        direction = first / (1 - 0.7**step) / (math.sqrt(second / (1 - 0.6**step)) + 0.3)
        for name, weight in expected.items():
            weight.mul_(1.0 - 0.05 * (0.0 if name == "wq.bias" else 0.2)).sub_(0.05 * direction)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_without_the_compiler_is_torchs(kind: type[torch.optim.Optimizer], implementation: str) -> None:
    """The same bits; gradients are on outside of the step, and off inside."""
    weights = []
    for each in (kind, without_compiler(kind)):
        model = small_model()
        optimizer = each(model.parameters(), lr=0.1, **{implementation: True})
        for step in range(3):
            set_gradients(model, 0.3 + step)
            optimizer.step()
            optimizer.zero_grad()
        assert torch.is_grad_enabled()
        assert all(parameter.grad is None for parameter in model.parameters())
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_state_bytes_are_those_of_a_step(name: str) -> None:
    model, optimizer = build(name, "for-loop")
    set_gradients(model, 0.5)
    optimizer.step_if(torch.tensor(True))
    expected = sum(tensor.nbytes for _, tensor in optimizer.named_state())
    assert state_bytes(OptimizerConfig(name=name), model.parameters()) == expected


def test_sgd_adds_the_decay_to_the_gradient() -> None:
    section = OptimizerConfig(name="SGD", lr=0.05, weight_decay=0.2, weight_decay_skip=("*.bias",))
    model = small_model()
    optimizer = build_optimizer(section, [model], CPU)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    set_gradients(model, 0.5)
    optimizer.step_if(torch.tensor(True))
    for name, parameter in model.named_parameters():
        decay = 0.0 if name == "wq.bias" else 0.2 * before[name]
        torch.testing.assert_close(parameter.detach(), before[name] - 0.05 * (0.5 + decay), rtol=1e-13, atol=1e-15)


def test_auto_is_fused_adamw_and_foreach_sgd() -> None:
    assert build()[1].optimizer.defaults["fused"] is True
    assert build("SGD")[1].optimizer.defaults["foreach"] is True


def test_edges_of_the_ranges_are_valid() -> None:
    assert check_optimizer(OptimizerConfig(beta1=0.0, beta2=0.0, weight_decay=0.0)) == []
    assert check_optimizer(OptimizerConfig(name="SGD", implementation="foreach")) == []
