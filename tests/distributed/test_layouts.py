"""Every layout has the initial weights, gradients, losses and gradient norms of one process."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.distributed.gradients import build_on_mesh, local_batches
from tests.distributed.layouts import (
    ALL,
    BOUNDS,
    LEARNING_RATE,
    QUICK,
    SIXTEEN,
    SLOW,
    SOAK,
    SOAK_UNEVEN,
    THREE_AXES,
    UNEVEN,
    Layout,
    is_supported,
    measure_all,
)
from tests.distributed.reference import global_batch
from tests.pool import run_ranks
from titanlite.models import linear
from titanlite.parallel.mesh import PipelineSchedule
from titanlite.runtime.determinism import DebugConfig, apply_determinism


def run(layouts: Sequence[Layout], dtype: str) -> list[dict[str, Any]]:
    with patch.object(linear, "LEAST_PRODUCTS", 1):  # all products in float32 by oneDNN
        return [asdict(measured) for measured in measure_all(layouts, dtype)]


def verify(layouts: Sequence[Layout], dtype: str) -> dict[Layout, tuple[float, ...]]:
    """Compare each layout with the reference; return losses by layout."""
    losses = {}
    ranks = run_ranks(run, layouts[0].world_size, layouts, dtype)
    for index, layout in enumerate(layouts):
        for rank, found in enumerate(measured[index] for measured in ranks):
            case = f"{dtype}, rank {rank}: {layout}: {found}"
            assert found["same_initial_weights"], case
            for key in ("gradient", "loss", "grad_norm", "trajectory"):
                assert found[key] <= BOUNDS[dtype], case
            assert found["losses"] == ranks[0][index]["losses"], case
            assert found["learned"] > 1e-3, f"the updates are too small to detect: {case}"
        losses[layout] = tuple(ranks[0][index]["losses"])
    return losses


@pytest.mark.parametrize(
    ("world_size", "dtype", "table"),
    [
        (1, "float64", QUICK),
        (2, "float64", QUICK),
        pytest.param(1, "float64", SLOW, marks=pytest.mark.slow),
        *(pytest.param(size, "float64", (*SLOW, *UNEVEN), marks=pytest.mark.slow) for size in (2, 3, 4)),
        pytest.param(8, "float64", THREE_AXES, marks=pytest.mark.slow),
        pytest.param(8, "float64", SLOW, marks=pytest.mark.soak),
        pytest.param(1, "float32", QUICK, marks=pytest.mark.slow),
        pytest.param(2, "float32", QUICK, marks=pytest.mark.soak),
        *(pytest.param(size, "float64", SOAK, marks=pytest.mark.soak) for size in (1, 2, 4, 8)),
        *(pytest.param(size, "float64", SOAK_UNEVEN, marks=pytest.mark.soak) for size in (3, 4, 5, 6, 7)),
        *(pytest.param(size, "float32", (*SLOW, *SOAK), marks=pytest.mark.soak) for size in (1, 2, 4, 8)),
    ],
)
def test_numbers_match_one_process(world_size: int, dtype: str, table: Sequence[Layout]) -> None:
    layouts = [layout for layout in table if layout.world_size == world_size and is_supported(layout)]
    losses = verify(layouts, dtype)
    if world_size == 8 and table is SLOW:
        sharded, replicated = (losses[layout] for layout in layouts if layout.axes in ((1, 1, 2, 4), (1, 2, 1, 4)))
        assert sharded == pytest.approx(replicated, rel=BOUNDS[dtype], abs=0)


@pytest.mark.soak  # default suite: THREE_AXES
def test_all_axes_at_once_on_sixteen_ranks() -> None:
    verify(SIXTEEN, "float64")


def test_layout_tables_cover_schedules_meshes_and_accumulation() -> None:
    assert len(ALL) == len(set(ALL)) >= 44
    assert {layout.world_size for layout in ALL} == {*range(1, 9), 16}
    schedules = [layout.schedule for layout in ALL]
    for name in PipelineSchedule.__args__:
        assert schedules.count(name) >= 2, name
    assert {(1, 2, 2, 2), (1, 1, 2, 4), (1, 2, 1, 4), (2, 2, 2, 2)} <= {layout.axes for layout in ALL}
    assert {layout.accumulation for layout in ALL} == {1, 2, 3}


REPEATED = (
    Layout((1, 1, 2, 2), ("optimizer.name=AdamW",), accumulation=2),
    Layout((2, 1, 1, 2), ("optimizer.name=AdamW", "parallelism.pp_schedule=Interleaved1F1B")),
    Layout((1, 2, 2, 1), ("optimizer.name=AdamW",), accumulation=2),
    Layout((1, 1, 2, 1), ("optimizer.name=AdamW",), cp=2),
)
"""FSDP x TP, PP x TP, hybrid sharding, FSDP x CP."""


def digests(repeats: int) -> list[list[str]]:
    """By layout and repeat: SHA-256 of this rank's losses, gradient norms and weights after three steps."""
    apply_determinism(DebugConfig(deterministic=True))
    found = []
    for layout in REPEATED:
        config = layout.config("training.dtype=float32", f"optimizer.lr={LEARNING_RATE}")
        runs = []
        for _ in range(repeats):
            trainer, mesh = build_on_mesh(config)
            seen = []
            for step in range(3):
                batch = global_batch("uneven", step, layout.rows)
                stats = trainer.train_step(local_batches(config, mesh, batch))
                seen += [stats.mean_loss, stats.grad_norm]
            seen += [p.detach() for part in trainer.model_parts for p in part.parameters()]
            flat = [getattr(tensor, "_local_tensor", tensor).contiguous().flatten() for tensor in seen]
            runs.append(hashlib.sha256(torch.cat(flat).numpy().tobytes()).hexdigest())
        found.append(runs)
    return found


@pytest.mark.soak  # default suite: test_replicas_and_repeats_are_bit_identical
def test_repeats_are_bit_identical() -> None:
    for first, second in zip(run_ranks(digests, 4, 2), run_ranks(digests, 4, 1), strict=True):
        for runs, again in zip(first, second, strict=True):
            assert len({*runs, *again}) == 1
