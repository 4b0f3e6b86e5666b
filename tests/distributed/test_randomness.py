"""Random draws in training: by row key, equal on all layouts; from torch, repeatable on the same layout."""

from collections.abc import Sequence
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.distributed.drawing import drawing_families
from tests.distributed.gradients import build_on_mesh, build_without_updates, compare, full_tensor, local_batches
from tests.distributed.layouts import BOUNDS, COMPILE, FULL, Layout, depth, is_supported, schedule
from tests.distributed.reference import global_batch, reference_step
from tests.pool import run_ranks
from titanlite import forward as forward_module
from titanlite.runtime.errors import ConfigError
from titanlite.trainer import Trainer

pytestmark = pytest.mark.slow

STEP = 5
STATES = count()


def trainer_at(step: int, layout: Layout, family: str, *settings: str) -> tuple[Trainer, list[Any], Any]:
    """(trainer with initial weights before `step`, batches of that step, configuration)"""
    torch._dynamo.reset()
    config = layout.config(f"model.family={family}", *settings)
    trainer, mesh = build_without_updates(config)
    trainer.step = step - 1
    batch = global_batch("silent_ranks", step - 1, layout.rows)
    return trainer, local_batches(config, mesh, batch), config


def drawn_by_key(layouts: Sequence[Layout]) -> list[float]:
    """Worst error of a step on each layout, compared with the global batch in one process."""
    found = []
    with drawing_families():
        for layout in layouts:
            trainer, batches, config = trainer_at(STEP, layout, "drawing")
            reference = reference_step(config, global_batch("silent_ranks", STEP - 1, layout.rows), STEP)
            stats = trainer.train_step(batches)
            found.append(compare(trainer, stats.mean_loss, stats.grad_norm, reference, True).worst)
    return found


ONE = (
    Layout((1, 1, 1, 1)),
    Layout((1, 1, 1, 1), FULL, accumulation=4),
    Layout((1, 1, 1, 1), (*COMPILE, *FULL), accumulation=2),
)
TWO = (
    Layout((1, 2, 1, 1), accumulation=2),
    Layout((1, 1, 2, 1)),
    Layout((2, 1, 1, 1), (*schedule("1F1B"), *FULL)),
    Layout((2, 1, 1, 1), (*schedule("ZBVZeroBubble"), *depth(3))),
    Layout((1, 1, 2, 1), streams=9),  # uneven: with filler rows
)
SOAK_TWO = (
    Layout((2, 1, 1, 1), (*schedule("1F1B"), "parallelism.gradient_sync=every"), accumulation=2),
    Layout((2, 1, 1, 1), (*schedule("Interleaved1F1B"), *depth(3), "parallelism.pp_microbatch_size=2")),
    Layout((2, 1, 1, 1), (*schedule("InterleavedZeroBubble"), *depth(3))),
)
FOUR = (Layout((2, 2, 1, 1), schedule("1F1B")), Layout((2, 1, 2, 1), schedule("GPipe"), accumulation=2))


@pytest.mark.parametrize(
    "layouts", [ONE, TWO, *(pytest.param(each, marks=pytest.mark.soak) for each in (SOAK_TWO, FOUR))]
)
def test_draws_by_row_key_are_equal_on_every_layout(layouts: Sequence[Layout]) -> None:
    usable = [layout for layout in layouts if is_supported(layout)]
    for rank, errors in enumerate(run_ranks(drawn_by_key, usable[0].world_size, usable)):
        for layout, error in zip(usable, errors, strict=True):
            assert error <= BOUNDS["float64"], f"rank {rank}, {layout}"


def refusal(layout: Layout) -> str:
    with drawing_families(), pytest.raises(ConfigError) as raised:
        build_on_mesh(layout.config("model.family=drawing"))
    return str(raised.value)


def test_draws_by_row_key_are_refused_with_context_parallelism() -> None:
    """Each rank would draw the numbers of the first positions."""
    for text in run_ranks(refusal, 2, Layout((1, 1, 1, 1), cp=2)):
        assert (
            'parallelism.cp = 2\n    rule:   1 with model.family = "drawing": it draws random numbers by row key'
            in text
        )


def test_each_input_of_a_draw_changes_the_loss() -> None:
    """Otherwise the comparison above would test nothing."""
    batch = global_batch("silent_ranks", STEP - 1)
    later = batch._replace(sequences=batch.sequences + 16)
    with drawing_families():
        plain, drawing, seeded = (
            ONE[0].config(*settings)
            for settings in ([], ["model.family=drawing"], ["model.family=drawing", "debug.seed=1"])
        )
        losses = [
            reference_step(config, rows, step).loss.item()
            for config, rows, step in (
                (plain, batch, STEP),
                (drawing, batch, STEP),
                (drawing, batch, STEP + 1),
                (drawing, later, STEP),
                (seeded, batch, STEP),
            )
        ]
    assert min(abs(one - other) for n, one in enumerate(losses) for other in losses[:n]) > 1e-6


def step_with_torch_draws(layout: Layout, seed: int) -> list[Any]:
    """Loss and gradient norms of a step, for an arbitrary initial state of torch's generators."""
    with drawing_families():
        trainer, batches, _ = trainer_at(STEP, layout, "torch_drawing")
        trainer.seed = seed
        torch.manual_seed(next(STATES))
        stats = trainer.train_step(batches)
        named = [item for part in trainer.model_parts for item in part.named_parameters()]
        return [stats.mean_loss.item(), {name: full_tensor(p.grad).norm().item() for name, p in named}]


def repeated_steps_with_torch_draws(layouts: Sequence[Layout]) -> list[list[bool]]:
    """For each layout: [a repeat is equal, a step with another seed is equal]."""
    found = []
    for layout in layouts:
        first = step_with_torch_draws(layout, 0)
        found.append([step_with_torch_draws(layout, 0) == first, step_with_torch_draws(layout, 1) == first])
    return found


def test_draws_from_torch_repeat_on_the_same_layout() -> None:
    for layouts in ([ONE[1]], [TWO[0], TWO[2]]):
        for found in run_ranks(repeated_steps_with_torch_draws, layouts[0].world_size, layouts):
            assert found == [[True, False]] * len(layouts)


def seeded(layouts: Sequence[Layout]) -> list[list[list[int]]]:
    """(seed, step, sequence, pp_rank) of each seeding of torch's generators in a step, by layout"""
    found = []
    for layout in layouts:
        calls: list[list[int]] = []
        with patch.object(forward_module, "seed_microbatch", lambda *facts, calls=calls: calls.append([*facts[:4]])):
            trainer, batches, _ = trainer_at(STEP, layout, "llama3", "debug.seed=3")
            trainer.train_step(batches)
        found.append(calls)
    return found


def test_torch_is_seeded_by_the_first_sequence_of_each_microbatch_and_the_stage() -> None:
    single, pair, piped = Layout((1, 1, 1, 1), accumulation=4), TWO[0], TWO[2]
    assert run_ranks(seeded, 1, [single]) == [[[[3, STEP, 64 + n, 0] for n in (0, 4, 8, 12)]]]
    by_rank = run_ranks(seeded, 2, [pair, piped])
    for rank, (of_pair, of_piped) in enumerate(by_rank):
        assert of_pair == [[3, STEP, 64 + rank + n, 0] for n in (0, 8)]
        assert of_piped == [[3, STEP, 64, rank]]
