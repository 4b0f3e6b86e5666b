"""Registered losses: their value, gradients and terms in chunks equal those of all tokens; faults are reported."""

import runpy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import titanlite
from tests.custom_loss import LOSS, plain_objective
from tests.distributed.test_plan_memory import peak_bytes
from tests.unit.models.test_head import FORMS, ROWS, inputs, layer
from titanlite.models.head import LossComputation, OutputLayer
from titanlite.models.llama3 import LLAMA3
from titanlite.models.losses import (
    CROSS_ENTROPY,
    LOSSES,
    Loss,
    Term,
    TokenFunction,
    check_loss,
    cross_entropy,
    extra_logits,
)
from titanlite.planning.activations import Features, MicrobatchShape, activation_bytes
from titanlite.runtime.errors import UserError
from titanlite.runtime.plugins import load_plugins


def test_without_gradients_only_the_loss_is_computed() -> None:
    head, (x, labels, _) = layer(chunk=7, loss=LOSS), inputs()
    with torch.no_grad():
        found = head(x, labels, torch.ones(ROWS, dtype=torch.int64)).sum()
        _, mean, _ = plain_objective(nn.functional.linear(x, head.weight).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(found, mean * (labels >= 0).sum(), rtol=1e-13, atol=0)
    assert head.term_sums is not None
    assert not head.term_sums.any()


class NamesOfOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add(str(function))
        return function(*args, **(kwargs or {}))


@FORMS
def test_the_host_never_reads_the_device(recomputes: bool) -> None:
    head, (x, labels, num_valid) = layer(chunk=7, recomputes=recomputes, loss=LOSS), inputs()
    with NamesOfOperations() as names:
        head(x, labels, num_valid).sum().backward()
    assert "aten.mm.out" in names.found
    assert not names.found & {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.index.Tensor"}


def test_the_plain_cross_entropy_is_that_of_the_output_layer() -> None:
    """A loss of the same function takes the path of registered losses."""
    assert LOSSES == {"cross_entropy": CROSS_ENTROPY}
    x, labels, num_valid = inputs()
    shares = []
    for loss in (CROSS_ENTROPY, Loss("another", cross_entropy)):
        shares.append(layer(loss=loss)(x, labels, num_valid))
    torch.testing.assert_close(*shares, rtol=1e-13, atol=0)


def token_mean(logits: Tensor, labels: Tensor) -> Tensor:
    """Depends on the other tokens of the call."""
    losses = cross_entropy(logits, labels)
    return losses - losses.mean()


FAULTS: list[tuple[Callable[[Tensor, Tensor], Any], str]] = [
    (lambda logits, labels: cross_entropy(logits, labels).mean(), r"returns shape \(\) for logits of shape \(8, 24\)"),
    (lambda *given: given[0], r"returns shape \(8, 24\)"),
    (lambda *_: None, "returns NoneType"),
    (lambda *given: given[1], r"returns torch.int64 for logits in torch.float64"),
    (lambda logits, labels: cross_entropy(logits, labels).float(), "returns torch.float32 for logits in torch.float64"),
    (lambda logits, labels: cross_entropy(logits.detach(), labels), "without a gradient"),
    (lambda logits, labels: logits.gather(1, labels.unsqueeze(1)).squeeze(1), r"raises RuntimeError: .*clamp\(min=0\)"),
    (lambda logits, labels: cross_entropy(logits, labels) / 0, "not finite"),
    (lambda logits, labels: cross_entropy(logits, labels) * torch.rand(len(labels)), "are random"),
    (token_mean, "change with the size of a chunk"),
]


@pytest.mark.parametrize(("function", "message"), FAULTS)
def test_faults_of_functions_are_reported(function: Callable[[Tensor, Tensor], Any], message: str) -> None:
    term = Term(function, torch.ones_like)
    for name, loss in (
        ('^loss "mine"', Loss("mine", function)),
        ('^loss "mine", term "extra"', Loss("mine", cross_entropy, {"extra": term})),
    ):
        with pytest.raises(UserError, match=f"(?s){name} .*{message}"):
            check_loss(loss)


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (lambda labels: labels.sum(), r"returns a count of shape \(\)"),
        (lambda labels: len(labels), "returns int as count"),
        (lambda labels: -torch.ones_like(labels), "negative"),
        (lambda labels: torch.full_like(labels, len(labels)), "change with the size of a chunk"),
    ],
)
def test_faults_of_counts_are_reported(count: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_loss(Loss("mine", cross_entropy, {"extra": Term(cross_entropy, count)}))


def test_valid_losses_have_no_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    examples: list[Loss] = []

    def register_loss(name: str, loss: TokenFunction, *, terms: dict[str, Term]) -> None:
        examples.append(Loss(name, loss, terms))

    monkeypatch.setattr(titanlite, "register_loss", register_loss, raising=False)
    runpy.run_path(str(Path(titanlite.__file__).parents[1] / "examples" / "loss.py"))
    (example,) = examples
    assert list(example.terms) == ["z_loss"]
    for loss in (CROSS_ENTROPY, LOSS, example):
        check_loss(loss)
    with pytest.raises(UserError, match='term "a/b" must have letters'):
        check_loss(Loss("mine", cross_entropy, {"a/b": Term(cross_entropy, torch.ones_like)}))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planned_memory_of_a_chunk_is_that_of_a_real_one(dtype: torch.dtype) -> None:
    """Beyond that of the cross-entropy."""
    ids, dim, chunk, tp = 16_384, 8, 32, 2
    config = replace(LLAMA3.flavors["debug"], vocab_size=ids, dim=dim)
    x, labels = torch.randn(1, 2 * chunk, dim).to(dtype).requires_grad_(), torch.arange(2 * chunk).unsqueeze(0)
    measured, planned = [], []
    for loss, extra in ((CROSS_ENTROPY, None), (LOSS, extra_logits(LOSS))):
        head = OutputLayer(dim, ids).to(dtype)
        head.computation = LossComputation(loss, chunk)
        head.start_step(torch.ones(2, dtype=torch.float64))
        measured.append(peak_bytes(lambda head=head: head(x, labels, labels[0, -1:]).sum().backward()))  # type: ignore[misc]
        shape = MicrobatchShape(1, 2 * chunk, 1, 1, dtype.itemsize, 4, chunk, False, False, extra_logits=extra)
        features = Features(2, is_latent=False, head_norms=False, wide_norms=False, sinks=False)
        planned += [activation_bytes(config, features, replace(shape, tp=tp)).loss for tp in (1, tp)]
    beyond = measured[1] - measured[0]
    assert planned[2] - planned[0] == pytest.approx(beyond, rel=0.2)
    assert planned[3] > 0.9 * planned[2], "each rank has all logits"


def test_a_fault_with_other_sizes_names_the_loss() -> None:
    """The check calls the functions with small logits only."""
    loss = Loss("mine", lambda logits, labels: cross_entropy(logits, labels).sum())
    head, (x, labels, num_valid) = layer(loss=loss), inputs()
    with pytest.raises(UserError, match=r'loss "mine" returns shape \(\) for logits of shape \(16, 101\): return one'):
        head(x, labels, num_valid)


@pytest.mark.usefixtures("registries")
def test_the_example_rounds_less_than_label_smoothing_of_torch() -> None:
    """The gradient of a row of logits sums to 0. With -s, prints the sums of docs/numerics.md."""
    load_plugins([str(Path(titanlite.__file__).parents[1] / "examples" / "loss.py")])
    generator = torch.Generator().manual_seed(0)
    logits, labels = 0.02 * torch.randn(16, 65_537, generator=generator), torch.arange(16)
    of_torch = partial(functional.cross_entropy, label_smoothing=0.1, reduction="none")
    sums = []
    for function in (LOSSES["smoothed"].function, of_torch):
        leaf = logits.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf, labels).sum(), leaf)
        sums.append(float(gradient.double().sum(1).abs().max()))
    print(f"largest sum of a row: {sums[0]:.1e}, by torch's label_smoothing {sums[1]:.1e}")
    assert sums[0] < 1e-5 < sums[1]
