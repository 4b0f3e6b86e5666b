"""Losses by source of a mixture: sums and counts on every mesh are those of one process."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.gradients import build_on_mesh, local_batches
from tests.distributed.layouts import COMPILE, LAST, PAIRS, Layout, schedule
from tests.distributed.reference import global_batch, plain_model, reference_step
from tests.pool import run_ranks
from titanlite.batch import IGNORE_INDEX, Batch
from titanlite.parallel.pipeline import Pipeline
from titanlite.trainer import totals_by_source

SOURCES = 3
LAYOUTS = (
    Layout((1, 1, 1, 1), COMPILE, accumulation=4),
    Layout((1, 2, 1, 1), accumulation=2),
    Layout((1, 1, 2, 1), (*LAST,), accumulation=2),
    Layout((1, 1, 2, 1), accumulation=2, streams=9),
    Layout((1, 1, 1, 2), accumulation=2),
    Layout((1, 1, 1, 1), accumulation=2, cp=2),
    Layout((2, 1, 1, 1), (*schedule("1F1B"), *PAIRS)),
    Layout((2, 1, 1, 1), (*schedule("Interleaved1F1B"), "parallelism.gradient_sync=every"), accumulation=2),
    Layout((2, 1, 1, 1), (*schedule("InterleavedZeroBubble"), "parallelism.pp_microbatch_size=3")),
    *(Layout((2, 1, 1, 1), schedule(name)) for name in ("ZBVZeroBubble", "DualPipeV") if torch.__version__ >= "2.12"),
)


def mixed_batch() -> Batch:
    """Uneven masks; the only row of the last source has no valid label."""
    sources = torch.tensor([2, 1, 0, 0, 1, 0, 1, 1, 0, 0, 0, 1, 1, 0, 1, 0])
    return global_batch("uneven")._replace(sources=sources)


def totals_on_mesh(layout: Layout) -> tuple[list[list[float]], float, float]:
    """(totals of a step over all ranks, loss, gradient norm)"""
    torch._dynamo.reset()
    trainer, mesh = build_on_mesh(layout.config())
    trainer.num_sources = SOURCES
    stats = trainer.train_step(local_batches(layout.config(), mesh, mixed_batch()))
    totals, loss = stats.by_source.clone(), stats.mean_loss.clone()
    dist.all_reduce(totals)
    dist.all_reduce(loss)
    return totals.tolist(), loss.item(), stats.grad_norm.item()


def all_totals(layouts: list[Layout]) -> list[Any]:
    return [totals_on_mesh(layout) for layout in layouts]


def planted_totals(layouts: list[Layout]) -> list[Any]:
    """Totals if the microbatches of a pipeline are recorded in reverse order."""

    def newest_first(pipeline: Pipeline, shares: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG001
        pipeline._row_shares.insert(0, shares.detach())
        return shares.sum()

    with patch.object(Pipeline, "_keep_shares", newest_first):
        return all_totals(layouts)


def expected_totals() -> tuple[list[list[float]], float]:
    """Totals and mean loss by plain torch, row by row."""
    model, batch = plain_model(LAYOUTS[0].config()), mixed_batch()
    totals = [[0.0] * SOURCES for _ in range(3)]
    for tokens, labels, source in zip(batch.tokens, batch.labels, batch.sources.tolist(), strict=True):
        valid = labels != IGNORE_INDEX
        scores = model(tokens[None])[0].log_softmax(-1)
        totals[0][source] -= scores[valid, labels[valid]].sum().item()
        totals[1][source] += int(valid.sum())
        totals[2][source] += bool(valid.any())
    return totals, sum(totals[0]) / sum(totals[1])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_totals_by_source_match_one_process(world_size: int) -> None:
    layouts = [layout for layout in LAYOUTS if layout.world_size == world_size]
    expected, mean_loss = expected_totals()
    assert expected[1][2] == 0 < expected[1][0] != expected[1][1]
    right_norm = reference_step(LAYOUTS[0].config(), mixed_batch()).grad_norm.item()
    for ranks in run_ranks(all_totals, world_size, layouts):
        for totals, loss, grad_norm in ranks:
            assert totals[1:] == expected[1:]
            assert totals[0] == pytest.approx(expected[0], rel=1e-12, abs=0)
            assert sum(totals[0]) / sum(totals[1]) == pytest.approx(loss, rel=1e-12)
            assert loss == pytest.approx(mean_loss, rel=1e-12)
            assert grad_norm == pytest.approx(right_norm, rel=1e-12)


@pytest.mark.slow
def test_wrong_order_of_rows_changes_the_totals() -> None:
    layouts = [layout for layout in LAYOUTS if layout.schedule in ("1F1B", "Interleaved1F1B")]
    expected, mean_loss = expected_totals()
    for totals, loss, _ in run_ranks(planted_totals, 2, layouts)[0]:
        assert loss == pytest.approx(mean_loss, rel=1e-12)  # the loss alone does not show the mistake
        assert abs(totals[0][0] - expected[0][0]) > 1e-3


def test_nonfinite_loss_affects_only_its_source() -> None:
    labels = torch.tensor([[1, IGNORE_INDEX], [1, 2], [IGNORE_INDEX, IGNORE_INDEX]])
    totals = totals_by_source(torch.tensor([math.nan, 2.0, 0.0]), labels, torch.tensor([1, 0, 0]), 3)
    assert totals.dtype == torch.float64
    assert str(totals.tolist()) == "[[2.0, nan, 0.0], [2.0, 1.0, 0.0], [1.0, 1.0, 0.0]]"
