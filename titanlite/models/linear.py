"""Linear layers, whose matrix products are not always those of torch: see Products and linear. Gated linear units."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from titanlite.runtime.torch_internals import linear_of_onednn

HAS_ONEDNN = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
_CPUINFO = Path("/proc/cpuinfo")
LEAST_PRODUCTS = math.inf if _CPUINFO.exists() and "GenuineIntel" in _CPUINFO.read_text() else 2**22
"""Multiplications from which oneDNN is faster: a call of it costs 10 microseconds, and MKL, which torch uses, has its
fastest code for Intel's processors only."""


class Products(Protocol):
    """The three matrix products of a linear layer. x, gradient: (…, positions, inputs or outputs); weight: (outputs,
    inputs)."""

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """x weight^T."""

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """gradient weight."""

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """gradient^T x, summed over all positions."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """functional.linear, by the fastest kernels: in float32 on x86 CPUs that are not of Intel by oneDNN, where torch
    multiplies by MKL.

    For layers with few numbers of rows: oneDNN keeps a program of 1 MB for each. See docs/performance.md, Matrix
    products on CPUs.
    """
    if is_by_onednn(x, weight):
        return multiplied(x, weight, bias, products=_OF_ONEDNN)
    return functional.linear(x, weight, bias)


def is_by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether `product` is by oneDNN. What it refuses is torch's, which says why."""
    if not HAS_ONEDNN or any(each.dtype != torch.float32 or each.device.type != "cpu" for each in (x, weight)):
        return False
    fits = x.dim() > 1 and weight.dim() == 2 and x.shape[-1] == weight.shape[-1]
    return fits and x.numel() * len(weight) >= LEAST_PRODUCTS


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T by the kernels of `linear`, without autograd. x: (…, inputs); weight: (outputs, inputs)."""
    return torch.ops.titanlite.linear(x, weight) if is_by_onednn(x, weight) else x @ weight.T


def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """gradient^T x, as `product`. gradient, x: (…, positions, outputs or inputs)."""
    rows, columns = gradient.flatten(0, -2).T, x.flatten(0, -2).T
    if len(rows) > len(columns) and is_by_onednn(rows, columns):  # which is faster with fewer rows
        return product(columns, rows).T
    return product(rows, columns)


def plus_product(base: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """beta base + alpha x weight^T, as `product`."""
    if is_by_onednn(x, weight):
        return product(x, weight).mul_(alpha).add_(base, alpha=beta)
    return torch.addmm(base, x, weight.T, beta=beta, alpha=alpha)


# torch's compiler does not take oneDNN's operation as it is. The first call of an operation by torch.library.custom_op
# imports the compiler: 1 second and 70 MB.
_LIBRARY = torch.library.Library("titanlite", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor weight) -> Tensor")
_LIBRARY.impl("linear", lambda x, weight: linear_of_onednn(x, weight), "CPU")


torch.library.register_fake(
    "titanlite::linear", lambda x, weight: x.new_empty(*x.shape[:-1], len(weight)), lib=_LIBRARY
)


def layer_linear(layer: nn.Linear, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` of the layer, by the products in its attribute `products` if it has one. weight, bias: its parts on this
    rank."""
    products = getattr(layer, "products", None)
    return linear(x, weight, bias) if products is None else multiplied(x, weight, bias, products=products)


def use_own_products(modules: Iterable[nn.Module]) -> None:
    """Let linear layers compute `layer_linear`, in place, but for those whose forward is not torch's."""
    for module in modules:
        is_plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        if is_plain and "forward" not in vars(module):
            module.forward = MethodType(_forward, module)


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer_linear(layer, x, layer.weight, layer.bias)


def multiplied(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, products: Products) -> Tensor:
    """functional.linear by these products.

    The gradients of x and of the parameters are nodes of their own in the autograd graph, so that a pipeline schedule
    can compute the latter later: autograd does not tell a function which of its gradients is needed now.
    """
    rows, matrix, shift = x.detach(), weight.detach(), None if bias is None else bias.detach()
    of_x = _Input.apply(x, matrix, products)  # type: ignore[no-untyped-call]
    of_parameters = _Parameters.apply(weight, bias, rows, products)  # type: ignore[no-untyped-call]
    out: Tensor = _Join.apply(of_x, of_parameters, rows, matrix, shift, products)  # type: ignore[no-untyped-call]
    return out


def _placeholder(x: Tensor, weight: Tensor) -> Tensor:
    """A tensor of the shape of the product, without memory, which gets the gradient of the product."""
    return x.new_zeros(()).expand(*x.shape[:-1], len(weight))


class _Input(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: Products) -> Tensor:
        ctx.products = products
        ctx.save_for_backward(weight)
        return _placeholder(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return ctx.products.input_gradient(gradient, weight), None, None


class _Parameters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, _bias: Tensor | None, x: Tensor, products: Products) -> Tensor:
        ctx.products = products
        ctx.save_for_backward(x)
        return _placeholder(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_weight = ctx.products.weight_gradient(gradient, x) if needs_weight else None
        return of_weight, gradient.flatten(0, -2).sum(dim=0) if needs_bias else None, None, None


class _Join(torch.autograd.Function):
    """The product, whose gradient both placeholders get."""

    @staticmethod
    def forward(
        _ctx: Any,
        _of_x: Tensor,
        _of_parameters: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        products: Products,
    ) -> Tensor:
        result = products.output(x, weight)
        return result if bias is None else result + bias

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, gradient, None, None, None, None


class _OfOneDNN:
    """Products in float32 on CPUs."""

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return product(x, weight)

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        return product(gradient, weight.T)

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        return weight_gradient(gradient, x)


_OF_ONEDNN = _OfOneDNN()


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its approximation with a hyperbolic tangent."""
    return functional.gelu(x, approximate="tanh")


_DERIVATIVES: dict[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]] = {
    functional.silu: torch.ops.aten.silu_backward,
    gelu_tanh: partial(torch.ops.aten.gelu_backward, approximate="tanh"),
}


def gated(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """activation(gate) * up. Of silu and gelu_tanh, backward computes the result again, so that it is not kept; in
    compiled blocks, the compiler decides."""
    is_known = any(activation is each for each in _DERIVATIVES) and (gate.dtype, gate.shape) == (up.dtype, up.shape)
    if not is_known or torch.compiler.is_compiling():
        return activation(gate) * up
    out: Tensor = _Gated.apply(gate, up, activation)  # type: ignore[no-untyped-call]
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return activation(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        of_gate = _DERIVATIVES[ctx.activation](gradient * up, gate)
        return of_gate, ctx.activation(gate).mul_(gradient), None
