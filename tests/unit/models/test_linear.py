"""Linear layers by oneDNN: results and gradients beside those in float64, and which layers and sizes have them."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from titanlite.models import linear as linears
from titanlite.models.head import LossComputation, OutputLayer
from titanlite.models.linear import HAS_ONEDNN, linear, plus_product, product, use_own_products, weight_gradient
from titanlite.runtime.torch_internals import linear_of_onednn

pytestmark = pytest.mark.skipif(not HAS_ONEDNN, reason="torch does not multiply by oneDNN here")

Calls = list[tuple[tuple[int, ...], tuple[int, ...]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The shapes of the operands of each product by oneDNN, of any size."""
    found: Calls = []

    def noted(x: Tensor, weight: Tensor) -> Tensor:
        found.append((tuple(x.shape), tuple(weight.shape)))
        return linear_of_onednn(x, weight)

    monkeypatch.setattr(linears, "LEAST_PRODUCTS", 1)
    monkeypatch.setattr(linears, "linear_of_onednn", noted)
    return found


def operands(outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias, and a gradient of the result with positions that do not count."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 9, inputs), (outputs, inputs), (outputs,), (2, 9, outputs))
    x, weight, bias, upstream = (torch.randn(shape, generator=generator) for shape in shapes)
    upstream[0, 5:] = upstream[1, 1:3] = 0
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), upstream


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 40), (40, 24)])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_result_and_gradients(calls: Calls, outputs: int, inputs: int, backend: str) -> None:
    *leaves, upstream = operands(outputs, inputs)
    exact = [each.detach().double().requires_grad_() for each in leaves]
    expected = functional.linear(*exact)
    result = torch.compile(linear, backend=backend, fullgraph=True)(*leaves)
    found = (result, *torch.autograd.grad(result, leaves, upstream))
    for own, other in zip(found, (expected, *torch.autograd.grad(expected, exact, upstream.double())), strict=True):
        assert own.dtype == torch.float32
        assert (own - other).norm() <= 1e-6 * other.norm()
    rows, columns = sorted((outputs, inputs))
    products = {((2, 9, inputs), (outputs, inputs)), ((2, 9, outputs), (inputs, outputs)), ((rows, 18), (columns, 18))}
    assert products <= set(calls)


def test_each_gradient_is_computed_alone(calls: Calls) -> None:
    """As by pipeline schedules that compute those of the inputs first."""
    x, weight, _, upstream = operands(24, 40)
    result = linear(x, weight)
    calls.clear()
    torch.autograd.grad(result, [x], upstream, retain_graph=True)
    assert calls == [((2, 9, 24), (40, 24))]
    torch.autograd.grad(result, [weight], upstream)
    assert calls[1:] == [((24, 18), (40, 18))]


def test_a_frozen_weight_has_no_gradient(calls: Calls) -> None:
    x, weight, bias, upstream = operands(24, 40)
    linear(x.detach(), weight.requires_grad_(False), bias).backward(upstream)
    torch.testing.assert_close(bias.grad, upstream.sum((0, 1)))
    assert len(calls) == 1


@pytest.mark.usefixtures("calls")
def test_a_result_may_be_changed_in_place() -> None:
    x, weight, _, upstream = operands(24, 40)
    linear(x, weight).add_(1).backward(upstream)
    torch.testing.assert_close(weight.grad, upstream.flatten(0, 1).T @ x.detach().flatten(0, 1))


@pytest.mark.usefixtures("calls")
def test_second_derivatives_are_refused() -> None:
    x, weight, *_ = operands(24, 40)
    (gradient,) = torch.autograd.grad(linear(x, weight).square().sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_the_loss_in_chunks(calls: Calls) -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(0)
        head = OutputLayer(12, 30).to(dtype)
        head.weight.data = torch.randn(30, 12, generator=generator).to(dtype)
        head.computation = LossComputation(chunk_tokens=7)
        x, labels = torch.randn(2, 9, 12, generator=generator).to(dtype).requires_grad_(), torch.arange(18).view(2, 9)
        labels[0, 5:] = labels[1, 1:3] = -1
        head(x, labels, torch.full((2,), 12)).sum().backward()
        found.append((x.grad, head.weight.grad))
    assert len(calls) == 3 * 3  # of three chunks
    for own, exact in zip(*found, strict=True):
        assert own is not None
        assert exact is not None
        assert (own - exact).norm() <= 1e-6 * exact.norm()


def test_operands_that_are_parts(calls: Calls) -> None:
    """Of the scores of a rank's ids, for example."""
    scores, x, weight = torch.randn(9, 50)[:, 7:31], torch.randn(18, 40)[::2], torch.randn(24, 80)[:, 5:45]
    torch.testing.assert_close(weight_gradient(scores, x), scores.T @ x)
    torch.testing.assert_close(product(scores, weight.T), scores @ weight)
    torch.testing.assert_close(plus_product(x, scores, weight.T, beta=3, alpha=-2), 3 * x - 2 * scores @ weight)
    assert len(calls) == 3


def test_others_are_those_of_torch(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias, _ = operands(24, 40)
    for dtype in (torch.float64, torch.bfloat16):
        own = [each.detach().to(dtype) for each in (x, weight, bias)]
        assert torch.equal(linear(*own), functional.linear(*own))
    assert linear(x.to("meta"), weight.to("meta")).shape == (2, 9, 24)
    assert linear(x[:0], weight).shape == (0, 9, 24)
    assert linear(x[0, 0], weight).shape == (24,)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(x[..., :30], weight)
    monkeypatch.setattr(linears, "LEAST_PRODUCTS", 2 * 9 * 24 * 40 + 1)
    assert torch.equal(linear(x, weight), functional.linear(x, weight))
    assert not calls


@pytest.mark.slow
def test_the_compiler_is_not_imported() -> None:
    """It takes 1 second and 70 MB."""
    program = (
        "import sys, torch; from titanlite.models import linear; linear.LEAST_PRODUCTS = 1; x = torch.ones(9, 9); "
    )
    program += "linear.linear(x.requires_grad_(), x).sum().backward(); assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * functional.linear(x, self.weight)


def test_layers_of_a_model(calls: Calls) -> None:
    """Those with a forward of their own keep it."""
    model = nn.Sequential(nn.Linear(40, 24), Doubled(24, 8, bias=False))
    x = torch.randn(2, 9, 40)
    expected = model(x)
    use_own_products(model.modules())
    torch.testing.assert_close(model(x), expected)
    assert calls == [((2, 9, 40), (24, 40))]
