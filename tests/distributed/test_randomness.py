"""What a model draws in training: by row keys alike on every layout, from torch's generators again on the same one."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
import torch

from tests.distributed.drawing import drawing_families
from tests.distributed.gradients import build_on_mesh, compare, local_batches, replaced, whole
from tests.distributed.layouts import BOUNDS, COMPILE, FULL, Layout, depth, runs_here, schedule
from tests.distributed.reference import global_batch, reference_step
from tests.pool import run_ranks
from titanlite import forward as forward_module
from titanlite.trainer import Trainer

pytestmark = pytest.mark.slow

STEP = 5
STATES = count()


def trainer_at(step: int, layout: Layout, family: str, *settings: str) -> tuple[Trainer, list[Any], Any]:
    """The trainer with initial weights before `step`, its batches of that step, and the configuration."""
    torch._dynamo.reset()
    config = layout.config(f"model.family={family}", *settings)
    trainer, mesh = build_on_mesh(config)
    trainer.step = step - 1
    batch = global_batch("silent_ranks", step - 1, layout.rows)
    return trainer, local_batches(config, mesh, batch), config


def drawn_by_key(layouts: Sequence[Layout]) -> list[float]:
    """The worst error of a step on each layout, against the whole batch at once in one process."""
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
    Layout((2, 1, 1, 1), (*schedule("1F1B"), "parallelism.gradient_sync=every"), accumulation=2),
    Layout((2, 1, 1, 1), (*schedule("Interleaved1F1B"), *depth(3), "parallelism.pp_microbatch_size=2")),
    Layout((2, 1, 1, 1), (*schedule("InterleavedZeroBubble"), *depth(3))),
    Layout((2, 1, 1, 1), (*schedule("ZBVZeroBubble"), *depth(3))),
)
FOUR = (Layout((2, 2, 1, 1), schedule("1F1B")), Layout((2, 1, 2, 1), schedule("GPipe"), accumulation=2))


def splits_in_old_torch(layout: Layout) -> bool:
    """torch 2.11 asks for the gradient of every argument of a stage where it splits the backward pass, keys as well."""
    return torch.__version__ < "2.12" and layout.schedule in ("InterleavedZeroBubble", "ZBVZeroBubble")


@pytest.mark.parametrize("layouts", [ONE, TWO, pytest.param(FOUR, marks=pytest.mark.soak)])
def test_what_is_drawn_by_key_is_the_same_on_every_layout(layouts: Sequence[Layout]) -> None:
    usable = [layout for layout in layouts if runs_here(layout) and not splits_in_old_torch(layout)]
    for rank, errors in enumerate(run_ranks(drawn_by_key, usable[0].world_size, usable)):
        for layout, error in zip(usable, errors, strict=True):
            assert error <= BOUNDS["float64"], f"rank {rank}, {layout}"


def test_other_draws_are_another_loss() -> None:
    """All that a draw depends on is seen in the loss, or else the comparison above would say nothing."""
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


def drawn_astray(layout: Layout, seed: int) -> list[Any]:
    """Loss of a step, and norms of its gradients, after the generators have been left in some state."""
    with drawing_families():
        trainer, batches, _ = trainer_at(STEP, layout, "straying")
        trainer.seed = seed
        torch.manual_seed(next(STATES))
        stats = trainer.train_step(batches)
        named = [item for part in trainer.model_parts for item in part.named_parameters()]
        return [stats.mean_loss.item(), {name: whole(p.grad).norm().item() for name, p in named}]


def drawn_astray_again(layouts: Sequence[Layout]) -> list[list[bool]]:
    """For each layout: whether a repetition is equal, and whether one with another seed is."""
    found = []
    for layout in layouts:
        first = drawn_astray(layout, 0)
        found.append([drawn_astray(layout, 0) == first, drawn_astray(layout, 1) == first])
    return found


def test_what_is_drawn_from_torch_comes_again_on_the_same_layout() -> None:
    for layouts in ([ONE[1]], [TWO[0], TWO[2]]):
        for found in run_ranks(drawn_astray_again, layouts[0].world_size, layouts):
            assert found == [[True, False]] * len(layouts)


def seeded(layouts: Sequence[Layout]) -> list[list[list[int]]]:
    """(seed, step, sequence, pp_rank) of each time that torch's generators are seeded in a step."""
    found = []
    for layout in layouts:
        calls: list[list[int]] = []
        with replaced(forward_module, "seed_microbatch", lambda *facts, calls=calls: calls.append([*facts[:4]])):
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
