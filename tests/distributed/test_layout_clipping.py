"""Clipping changes gradients identically in every layout, for both norms."""

from dataclasses import asdict
from typing import Any

import pytest
import torch

from tests.distributed.gradients import build_on_mesh, compare, local_batches
from tests.distributed.layouts import Layout, schedule
from tests.distributed.reference import Reference, global_batch, reference_step
from tests.pool import run_ranks

MAX_NORM = 0.01
TWO = [Layout((1, 1, 1, 2)), Layout((2, 1, 1, 1), schedule("Interleaved1F1B"))]
FOUR = [Layout((1, 1, 2, 2), ("model.tie_embeddings=true",)), Layout((2, 1, 1, 2), schedule("ZBVZeroBubble"))]
SOAK = [Layout((1, 2, 1, 2)), Layout((2, 1, 2, 1))]


def clipped(layouts: list[Layout]) -> list[dict[str, Any]]:
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
    for ranks in run_ranks(clipped, layouts[0].world_size, layouts):
        for layout, found in zip(layouts, ranks, strict=True):
            assert max(found["gradient"], found["grad_norm"]) <= 1e-11, (layout, found)
