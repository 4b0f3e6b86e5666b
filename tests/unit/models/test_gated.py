"""Gated linear units beside autograd."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from titanlite.models.linear import gated, gelu_tanh


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("activation", [functional.silu, gelu_tanh])
def test_a_gated_unit_keeps_its_inputs_only(activation: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """With the bits of autograd's gradients."""
    gate, up, upstream = (torch.randn(3, 7, 33, dtype=dtype) for _ in range(3))
    leaves, kept = (gate.requires_grad_(), up.requires_grad_()), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        out = gated(activation, *leaves)
    expected = activation(gate) * up
    assert torch.equal(out, expected)
    assert {each.data_ptr() for each in kept} == {gate.data_ptr(), up.data_ptr()}
    gradients = zip(*(torch.autograd.grad(each, leaves, upstream) for each in (out, expected)), strict=True)
    assert all(torch.equal(found, right) for found, right in gradients)
