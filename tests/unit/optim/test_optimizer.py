"""Formulas of the optimizers, and updates that are skipped on the device."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.optim.building import STRUCTURE, optimizer_of
from titanlite.optim.groups import divide
from titanlite.optim.optimizer import GatedOptimizer, OptimizerConfig, without_compiler
from titanlite.optim.registry import build_optimizer, check_optimizer, check_parameters, memory_bytes
from titanlite.parallel.mesh import ShardGroups

KINDS = {
    "AdamW": OptimizerConfig(lr=0.1),
    "AdamW, bfloat16": OptimizerConfig(lr=0.1, state_dtype="bfloat16"),
    "SGD": OptimizerConfig(name="SGD", lr=0.1),
    "SGD with momentum": OptimizerConfig(name="SGD", lr=0.1, momentum=0.9),
    "Lion": OptimizerConfig(name="Lion", lr=0.1),
    "Muon": OptimizerConfig(name="Muon", lr=0.1),
    "cautious NorMuon": OptimizerConfig(name="Muon", lr=0.1, normuon_beta2=0.9, cautious_weight_decay=True),
    "cautious AdamW": OptimizerConfig(lr=0.1, cautious_weight_decay=True),
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


@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if not kind.startswith("SGD")), "torch's for-loop"])
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


State = dict[str, Any]


def adamw(weight: Tensor, gradient: Tensor, state: State, decay: float, step: int) -> Tensor:
    state["exp_avg"] = 0.7 * state["exp_avg"] + 0.3 * gradient
    state["exp_avg_sq"] = 0.6 * state["exp_avg_sq"] + 0.4 * gradient**2
    denominator = (state["exp_avg_sq"] / (1 - 0.6**step)).sqrt() + 0.3
    return weight * (1 - 0.05 * decay) - 0.05 * state["exp_avg"] / (1 - 0.7**step) / denominator


def lion(weight: Tensor, gradient: Tensor, state: State, decay: float, step: int) -> Tensor:
    del step
    sign = torch.sign(0.7 * state["momentum"] + 0.3 * gradient)
    state["momentum"] = 0.6 * state["momentum"] + 0.4 * gradient
    return weight * (1 - 0.05 * decay) - 0.05 * sign


def sgd(weight: Tensor, gradient: Tensor, state: State, decay: float, step: int) -> Tensor:
    del state, step
    return weight - 0.05 * (gradient + decay * weight)


def sgd_with_momentum(weight: Tensor, gradient: Tensor, state: State, decay: float, step: int) -> Tensor:
    del step
    state["momentum_buffer"] = 0.7 * state["momentum_buffer"] + gradient + decay * weight
    return weight - 0.05 * state["momentum_buffer"]


def cautious(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The formula with weight decay of the elements that its update without decay moves towards 0."""

    def updated(weight: Tensor, gradient: Tensor, state: State, decay: float, step: int) -> Tensor:
        after = formula(weight, gradient, state, 0.0, step)
        return after - 0.05 * decay * weight * ((weight - after) * weight >= 0)

    return updated


FORMULAS: list[tuple[Callable[..., Tensor], dict[str, Any], torch.dtype]] = [
    (adamw, {"beta1": 0.7, "beta2": 0.6, "eps": 0.3}, torch.float64),
    (lion, {"name": "Lion", "beta1": 0.7, "beta2": 0.6}, torch.float64),
    (lion, {"name": "Lion", "beta1": 0.7, "beta2": 0.6}, torch.bfloat16),
    (cautious(adamw), {"beta1": 0.7, "beta2": 0.6, "eps": 0.3, "cautious_weight_decay": True}, torch.float64),
    (cautious(lion), {"name": "Lion", "beta1": 0.7, "beta2": 0.6, "cautious_weight_decay": True}, torch.float64),
    (sgd, {"name": "SGD"}, torch.float64),
    (sgd_with_momentum, {"name": "SGD", "momentum": 0.7}, torch.float64),
]
"""Every value differs from torch's default and ours, so that an ignored value shows."""


@pytest.mark.parametrize(("formula", "keys", "dtype"), FORMULAS)
def test_updates_match_the_formula(formula: Callable[..., Tensor], keys: dict[str, Any], dtype: torch.dtype) -> None:
    model, wide = small_model(dtype), torch.promote_types(dtype, torch.float32)
    optimizer = optimizer_of(model, OptimizerConfig(lr=0.05, weight_decay=0.2, **keys))
    expected = {name: parameter.detach().to(wide) for name, parameter in model.named_parameters()}
    states: dict[str, State] = {name: defaultdict(lambda: torch.zeros((), dtype=wide)) for name in expected}
    for step, gradient in enumerate((0.5, -0.2, 0.9), start=1):
        set_gradients(model, gradient)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            decay = 0.2 if name == "block.wq.weight" else 0.0
            expected[name] = formula(expected[name], parameter.grad.to(wide), states[name], decay, step)
        optimizer.step_if(torch.tensor(True))
    expected |= {f"{name}/{key}": value for name, state in states.items() for key, value in state.items()}
    bound = {"rtol": 1e-13, "atol": 1e-15} if dtype == torch.float64 else {"rtol": 0.0, "atol": 8e-3}
    found = snapshot(model, optimizer)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].to(wide), tensor, **bound)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_planned_bytes_of_the_state_are_those_of_a_step(kind: str, dtype: torch.dtype) -> None:
    model = small_model(dtype)
    optimizer = optimizer_of(model, KINDS[kind])
    set_gradients(model, 0.5)
    optimizer.step_if(torch.tensor(True))
    expected = sum(tensor.nbytes for _, tensor in optimizer.named_state())
    named = dict(model.named_parameters())
    state, update = memory_bytes(KINDS[kind], divide(KINDS[kind], named, STRUCTURE))
    assert state == expected
    # that of Muon depends on the mesh: tests/distributed/test_plan_memory.py
    assert (update > 0) == (kind not in ("AdamW", "Muon"))


BF16_STATE: dict[str, Any] = {"state_dtype": "bfloat16"}
COMBINATIONS: list[tuple[OptimizerConfig, torch.dtype, str, str]] = [
    (OptimizerConfig(name="SGD", **BF16_STATE), torch.float32, "state_dtype", "only with AdamW"),
    (
        OptimizerConfig(beta2=0.995, state_rounding="nearest", **BF16_STATE),
        *(torch.float32, "state_rounding", "never falls"),
    ),
    (OptimizerConfig(momentum=0.9), torch.float32, "momentum", "not with AdamW"),
    (OptimizerConfig(newton_schulz_coefficients=(1.0, 2.0)), torch.float32, "newton_schulz_coefficients", "three"),
    (OptimizerConfig(beta2=0.995), torch.bfloat16, "beta2", 'optimizer.state_dtype = "bfloat16"'),
    (OptimizerConfig(beta1=0.0, beta2=0.0, weight_decay=0.0), torch.float32, "", ""),
    (OptimizerConfig(beta2=0.99, **BF16_STATE), torch.float32, "", ""),
    (OptimizerConfig(beta2=0.999, **BF16_STATE), torch.float32, "", ""),
    (OptimizerConfig(beta2=0.99), torch.bfloat16, "", ""),
    (OptimizerConfig(beta2=0.999, **BF16_STATE), torch.bfloat16, "", ""),
    (OptimizerConfig(name="Lion", beta2=0.995), torch.bfloat16, "", ""),
]
"""A section, the dtype of the parameters, the key that is refused, and words of the problem; valid ones without."""


@pytest.mark.parametrize(("section", "dtype", "key", "words"), COMBINATIONS)
def test_combinations_that_do_not_work_are_refused(
    section: OptimizerConfig, dtype: torch.dtype, key: str, words: str
) -> None:
    named = dict(small_model().named_parameters())
    problems = [*check_optimizer(section), *check_parameters(section, named, STRUCTURE, dtype)]
    assert [problem.key for problem in problems] == ([f"optimizer.{key}"] if key else [])
    assert all(words in f"{problem.rule} {problem.remedy}" for problem in problems)


def test_bit_equal_adamw_does_not_depend_on_where_a_shard_ends() -> None:
    """torch's fused kernel does. Full vector registers have its bits, and an update can be skipped."""

    def updated(part: slice, *, bit_equal: bool, skipped: int = -1) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        weights, *gradients = (torch.randn(1304, generator=generator)[part] for _ in range(11))
        model = nn.ParameterDict({"wq": nn.Parameter(weights.clone())})
        optimizer = build_optimizer(
            *(
                OptimizerConfig(lr=0.1),
                dict(model.named_parameters()),
                STRUCTURE,
                torch.device("cpu"),
                ShardGroups(),
                0,
            ),
            bit_equal=bit_equal,
        )
        optimizer.init_state()
        optimizer.set_lr(0.1)
        for number, gradient in enumerate(gradients):
            model["wq"].grad = gradient.clone()
            optimizer.step_if(torch.tensor(number != skipped))
        return model["wq"].detach()

    full, aligned = slice(None), slice(0, 1280)
    for bit_equal in (True, False):
        parts = [updated(slice(begin, begin + 13), bit_equal=bit_equal) for begin in range(0, 1304, 13)]
        assert torch.equal(torch.cat(parts), updated(full, bit_equal=bit_equal)) == bit_equal
    for skipped in (-1, 4):
        expected = updated(aligned, bit_equal=False, skipped=skipped)
        assert torch.equal(updated(full, bit_equal=True, skipped=skipped)[aligned], expected)
    assert not torch.equal(expected, updated(aligned, bit_equal=False))
