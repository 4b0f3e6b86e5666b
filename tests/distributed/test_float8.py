"""Float8 has the same blocks on every layout: gradients, losses and norms are those of one process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import pytest

from tests.distributed.layouts import (
    BOUNDS,
    BY_OP,
    COMPILE,
    EP,
    EXPERTS,
    FOUR_KV_HEADS,
    FULL,
    GATHER,
    PAIRS,
    QWEN2,
    Layout,
    depth,
    measure,
    schedule,
)
from tests.pool import run_ranks
from titanlite.models.float8 import RECIPES, Recipe, RecipeName

MXFP8, BLOCKWISE, ROWWISE = ((f"float8.recipe={name}",) for name in RECIPES)
WIDE = ("float8.scale=float32",)
SMALL: dict[RecipeName, Recipe] = {
    "mxfp8": replace(RECIPES["mxfp8"], block=4),
    "blockwise": replace(RECIPES["blockwise"], block=4, weight_rows=4),
    "rowwise": RECIPES["rowwise"],
}
"""Blocks that divide the sizes of a small model."""

LAYOUTS = (
    Layout((1, 1, 1, 2), (*ROWWISE, *QWEN2)),
    Layout((1, 1, 1, 2), (*ROWWISE, *WIDE, *EXPERTS, *FULL)),
    Layout((1, 1, 1, 2), (*MXFP8, *BY_OP)),
    Layout((1, 1, 1, 2), (*BLOCKWISE, *WIDE, *COMPILE)),
    Layout((1, 1, 1, 1), (*MXFP8, *GATHER), cp=2),
    Layout((1, 1, 1, 1), (*BLOCKWISE, *WIDE), cp=2),
    Layout((1, 1, 2, 1), (*BLOCKWISE, *EXPERTS, *EP)),
    Layout((2, 1, 1, 1), (*MXFP8, *schedule("ZBVZeroBubble"), *depth(3), *PAIRS)),
    Layout((1, 1, 3, 1), (*MXFP8, *FULL), streams=8),
    Layout((1, 1, 1, 4), (*ROWWISE, *WIDE, *FOUR_KV_HEADS)),
    Layout((1, 1, 1, 4), (*MXFP8, *FOUR_KV_HEADS)),
    Layout((2, 1, 1, 2), (*BLOCKWISE, *schedule("1F1B"), *PAIRS)),
    Layout((1, 1, 2, 2), (*ROWWISE, *EXPERTS, *EP)),
)


@contextmanager
def small_blocks() -> Iterator[None]:
    before = dict(RECIPES)
    RECIPES.update(SMALL)
    try:
        yield
    finally:
        RECIPES.update(before)


def run(layouts: Sequence[Layout]) -> list[dict[str, Any]]:
    with small_blocks():
        return [asdict(measure(layout)) for layout in layouts]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_numbers_match_one_process(world_size: int) -> None:
    layouts = [layout for layout in LAYOUTS if layout.world_size == world_size]
    for rank, found in enumerate(run_ranks(run, world_size, layouts)):
        for layout, errors in zip(layouts, found, strict=True):
            case = f"rank {rank}: {layout}: {errors}"
            assert errors["same_initial_weights"], case
            for key in ("gradient", "loss", "grad_norm", "trajectory"):
                assert errors[key] <= BOUNDS["float64"], case
            assert errors["learned"] > 1e-3, case
