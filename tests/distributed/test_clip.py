"""The gradient norm, and clipping to it, over parameters of every placement at once."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.distributed.gradients import difference, whole
from titanlite.parallel.clip import clip_grad_norm_
from titanlite.runtime.launch import run_ranks


def clipped(dtype_name: str, max_norm: float) -> tuple[float, float, str]:
    """Errors of the norm and of the gradients after it, against the whole gradients in float64; the norm's dtype."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    generator = torch.Generator().manual_seed(0)
    model = nn.Module()
    gradients = {}
    # hybrid: one row, so a shard is empty; sharded: uneven; both: over both axes; a replica; one without a mesh
    for name, rows, of, placements in (
        ("hybrid", 1, mesh, [Replicate(), Shard(0)]),
        ("sharded", 3, mesh["dp_shard"], [Shard(0)]),
        ("both", 5, mesh, [Shard(0), Shard(0)]),
        ("replicated", 2, mesh["dp_replicate"], [Replicate()]),
        ("plain", 2, None, []),
    ):
        gradient = torch.randn(rows, 3, generator=generator, dtype=torch.float64).to(dtype)
        gradients[name] = gradient.double()
        parameter, local = torch.zeros_like(gradient), gradient.clone()
        if of is not None:
            parameter = distribute_tensor(parameter, of, placements, src_data_rank=None)
            local = distribute_tensor(local, of, placements, src_data_rank=None)
        model.register_parameter(name, nn.Parameter(parameter))
        getattr(model, name).grad = local
    model.register_parameter("unused", nn.Parameter(torch.zeros(2, dtype=dtype)))
    norm = clip_grad_norm_([model], max_norm)
    expected = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    scale = min(1.0, max_norm / (expected.item() + 1e-6)) if max_norm > 0 else 1.0
    errors = [difference(whole(getattr(model, name).grad), scale * gradient) for name, gradient in gradients.items()]
    return difference(norm, expected), max(errors), str(norm.dtype)


BOUNDS = {
    "float64": ("torch.float64", 1e-15, 1e-15),
    "float32": ("torch.float32", 1e-6, 1e-6),
    "bfloat16": ("torch.float32", 1e-6, 4e-3),
}
"""Dtype of the gradients: dtype of the norm, allowed error of the norm, and of the gradients."""


def all_clipped() -> dict[str, list[tuple[float, float, str]]]:
    """max_norm 0.5 clips, 1,000 clips nothing, 0 and less only measure."""
    return {dtype: [clipped(dtype, max_norm) for max_norm in (0.5, 1e3, 0.0, -1.0)] for dtype in BOUNDS}


def test_the_norm_of_a_large_float32_gradient_is_exact() -> None:
    """torch's CPU norm of the whole tensor is off by 1e-5 here."""
    model = nn.Linear(1024, 2048, bias=False)
    model.weight.grad = torch.randn(model.weight.shape, generator=torch.Generator().manual_seed(0))
    expected = model.weight.grad.double().norm()
    assert difference(clip_grad_norm_([model], 0.0), expected) <= 1e-7


def test_every_element_counts_once_and_is_scaled_once() -> None:
    for found in run_ranks(all_clipped, 4):
        for dtype, (norm_dtype, norm_bound, gradient_bound) in BOUNDS.items():
            for norm_error, gradient_error, found_dtype in found[dtype]:
                assert found_dtype == norm_dtype
                assert norm_error <= norm_bound
                assert gradient_error <= gradient_bound
