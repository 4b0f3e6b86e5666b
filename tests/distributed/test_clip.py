"""Gradient norm and clipping over parameters of all placements, and in a step on each layout."""

import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.distributed.gradients import build_on_mesh, compare, difference, full_tensor, local_batches
from tests.distributed.layouts import Layout, schedule
from tests.distributed.reference import Reference, global_batch, reference_step
from tests.pool import run_ranks
from titanlite.parallel.clip import clip_grad_norm_
from titanlite.parallel.mesh import PARAMETER_AXES

Found = tuple[float, float, str]
PARAMETERS: dict[str, tuple[int, tuple[str, ...], list[Placement]]] = {
    "hybrid": (1, ("dp_replicate", "dp_shard"), [Replicate(), Shard(0)]),  # one row, so one shard is empty
    "sharded": (3, ("dp_shard",), [Shard(0)]),
    "both": (5, ("dp_replicate", "dp_shard"), [Shard(0), Shard(0)]),
    "columns": (4, ("tp",), [Shard(1)]),
    "norm": (3, ("dp_shard", "tp"), [Shard(0), Replicate()]),
    "all": (4, ("dp_replicate", "dp_shard", "tp"), [Replicate(), Shard(0), Shard(1)]),
    "replicated": (2, ("dp_replicate",), [Replicate()]),
    "plain": (2, (), []),
}
"""Name: (number of rows of three elements, mesh axes, placements)."""


def clipped(world: DeviceMesh, dtype_name: str, max_norm: float) -> Found:
    """(error of the norm, largest error of a clipped gradient, dtype of the norm); reference: full float64."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    mesh = world["dp_replicate", "dp_shard", "tp"]
    # Each pp rank has a different model; the norm covers all of them.
    models = [gradients_of(torch.Generator().manual_seed(stage), dtype) for stage in range(world["pp"].size())]
    mine = models[world["pp"].get_local_rank()]
    model = nn.Module()
    for name, (rows, axes, placements) in PARAMETERS.items():
        gradient, parameter = mine[name].clone(), torch.zeros(rows, 3, dtype=dtype)
        if axes:
            submesh = mesh[axes]
            parameter = distribute_tensor(parameter, submesh, placements, src_data_rank=None)
            gradient = distribute_tensor(gradient, submesh, placements, src_data_rank=None)
        model.register_parameter(name, nn.Parameter(parameter))
        getattr(model, name).grad = gradient
    model.register_parameter("unused", nn.Parameter(torch.zeros(2, dtype=dtype)))
    norm, _ = clip_grad_norm_([model], max_norm, world.get_group("pp"))
    everything = torch.cat([gradient.double().flatten() for gradients in models for gradient in gradients.values()])
    expected = torch.linalg.vector_norm(everything)
    scale = min(1.0, max_norm / (expected.item() + 1e-6)) if max_norm > 0 else 1.0
    errors = [
        difference(full_tensor(getattr(model, name).grad), scale * gradient.double()) for name, gradient in mine.items()
    ]
    return difference(norm, expected), max(errors), str(norm.dtype)


def gradients_of(generator: torch.Generator, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        name: torch.randn(rows, 3, generator=generator, dtype=torch.float64).to(dtype)
        for name, (rows, _, _) in PARAMETERS.items()
    }


BOUNDS = {
    "float64": ("torch.float64", 1e-15, 1e-15),
    "float32": ("torch.float32", 1e-6, 1e-6),
    "bfloat16": ("torch.float32", 1e-6, 4e-3),
}
"""Dtype of the gradients: dtype of the norm, allowed error of the norm, and of the gradients."""


def all_clipped(sizes: tuple[int, int, int, int]) -> dict[str, list[Found]]:
    """Errors by dtype. max_norm 0.5 clips; 1,000 has no effect; 0 and -1 only measure."""
    world = init_device_mesh("cpu", sizes, mesh_dim_names=PARAMETER_AXES)
    return {dtype: [clipped(world, dtype, max_norm) for max_norm in (0.5, 1e3, 0.0, -1.0)] for dtype in BOUNDS}


def clipped_on_meshes(meshes: list[tuple[int, int, int, int]]) -> list[dict[str, list[Found]]]:
    return [all_clipped(sizes) for sizes in meshes]


def test_the_norm_of_a_large_float32_gradient_is_exact() -> None:
    """torch's CPU norm of this tensor has a relative error of 1e-5."""
    model = nn.Linear(1024, 2048, bias=False)
    model.weight.grad = torch.randn(model.weight.shape, generator=torch.Generator().manual_seed(0))
    expected = model.weight.grad.double().norm()
    assert difference(clip_grad_norm_([model], 0.0, None).total, expected) <= 1e-7


@pytest.mark.parametrize(
    "meshes",
    [
        pytest.param([(1, 2, 2, 1), (2, 1, 1, 2)], marks=pytest.mark.slow),
        pytest.param([(1, 1, 2, 2), (2, 2, 1, 1)], marks=pytest.mark.soak),
    ],
)
def test_every_element_counts_once_and_is_scaled_once(meshes: list[tuple[int, int, int, int]]) -> None:
    for ranks in run_ranks(clipped_on_meshes, 4, meshes):
        for sizes, found in zip(meshes, ranks, strict=True):
            for dtype, (norm_dtype, norm_bound, gradient_bound) in BOUNDS.items():
                assert len(found[dtype]) == 4
                for norm_error, gradient_error, found_dtype in found[dtype]:
                    assert found_dtype == norm_dtype, sizes
                    assert norm_error <= norm_bound, sizes
                    assert gradient_error <= gradient_bound, sizes


def norms_with_a_nan() -> dict[str, list[float]]:
    return {axis: norms_with_a_nan_over(axis) for axis in ("pp", "dp_shard", "tp")}


def norms_with_a_nan_over(axis: str) -> list[float]:
    """Norms by the rank whose shard of the gradient has a NaN."""
    world = init_device_mesh(
        "cpu", tuple(2 if name == axis else 1 for name in PARAMETER_AXES), mesh_dim_names=PARAMETER_AXES
    )
    found = []
    for victim in range(2):
        local = torch.ones(2, 3)
        if world.get_rank() == victim:
            local[1, 2] = float("nan")
        gradient: torch.Tensor = local if axis == "pp" else DTensor.from_local(local, world[axis], [Shard(0)])
        model = nn.Module()
        model.register_parameter("weight", nn.Parameter(torch.zeros_like(gradient)))
        model.weight.grad = gradient
        found.append(clip_grad_norm_([model], 1.0, world.get_group("pp")).total.item())
    return found


def test_nan_on_one_rank_makes_the_norm_of_all_ranks_nan() -> None:
    for found in run_ranks(norms_with_a_nan, 2):
        for axis, norms_of_axis in found.items():
            assert [math.isfinite(norm) for norm in norms_of_axis] == [False] * 2, axis


MAX_NORM = 0.01
TWO = [
    *(Layout(axes) for axes in ((1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2))),
    Layout((2, 1, 1, 1), schedule("Interleaved1F1B")),
]
FOUR = [Layout((1, 1, 2, 2), ("model.tie_embeddings=true",)), Layout((2, 1, 1, 2), schedule("ZBVZeroBubble"))]
SOAK = [Layout((1, 2, 1, 2)), Layout((2, 1, 2, 1))]


def clipped_on_layouts(layouts: list[Layout]) -> list[dict[str, Any]]:
    found = []
    for layout in layouts:
        config = layout.config(f"training.max_norm={MAX_NORM}")
        batch = global_batch("silent_ranks", 0, layout.rows)
        reference = reference_step(config, batch)
        norms = torch.stack(list(torch._foreach_norm(list(reference.gradients.values()), 2)))
        norm = norms.square().sum().sqrt()
        assert norm > 2 * MAX_NORM  # clipping is active
        scale = MAX_NORM / (norm + 1e-6)
        gradients = {name: gradient * scale for name, gradient in reference.gradients.items()}
        trainer, mesh = build_on_mesh(config)
        stats = trainer.train_step(local_batches(config, mesh, batch))
        expected = Reference(reference.loss, norm, gradients, reference.weights)
        found.append(asdict(compare(trainer, stats.mean_loss, stats.grad_norm, expected, True)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [TWO, *(pytest.param(more, marks=pytest.mark.soak) for more in (FOUR, SOAK))])
def test_clipped_gradients_match_one_process(layouts: list[Layout]) -> None:
    for ranks in run_ranks(clipped_on_layouts, layouts[0].world_size, layouts):
        for layout, found in zip(layouts, ranks, strict=True):
            assert max(found["gradient"], found["grad_norm"]) <= 1e-11, (layout, found)
