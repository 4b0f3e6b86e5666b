"""Float8 has the same blocks on every layout: gradients, losses and norms are those of one process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from tests.distributed.layouts import (
    BOUNDS,
    BY_OP,
    COMPILE,
    DEEPSEEK_V3,
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
from titanlite.models import float8
from titanlite.models.float8 import RECIPES, Float8, ProductName, Recipe, RecipeName, float8_product, scales

MXFP8, BLOCKWISE, ROWWISE = ((f"float8.recipe={name}",) for name in RECIPES)
WIDE = ("float8.scale=float32",)
SMALL: dict[RecipeName, Recipe] = {
    "mxfp8": replace(RECIPES["mxfp8"], block=4),
    "blockwise": replace(RECIPES["blockwise"], block=4, weight_rows=4),
    "rowwise": RECIPES["rowwise"],
}
"""Blocks that divide the sizes of a small model."""

CUT = Layout((1, 1, 1, 2), (*ROWWISE, *WIDE, *EXPERTS, *FULL))
LAYOUTS = (
    CUT,
    Layout((1, 1, 1, 2), (*ROWWISE, *QWEN2)),
    Layout((1, 1, 1, 2), (*MXFP8, *BY_OP)),
    Layout((1, 1, 1, 1), (*MXFP8, *GATHER), cp=2),
    Layout((1, 1, 2, 1), (*BLOCKWISE, *EXPERTS, *EP), streams=9),
    Layout((2, 1, 1, 1), (*MXFP8, *schedule("ZBVZeroBubble"), *depth(3), *PAIRS)),
)
SOAK = (
    Layout((1, 1, 1, 4), (*ROWWISE, *WIDE, *FOUR_KV_HEADS)),
    Layout((1, 1, 2, 2), (*ROWWISE, *WIDE, *DEEPSEEK_V3, *EP)),
    Layout((1, 1, 1, 2), (*BLOCKWISE, *WIDE, *COMPILE)),
    Layout((1, 1, 1, 2), (*BLOCKWISE, *WIDE, *FOUR_KV_HEADS), cp=2),
    Layout((2, 1, 1, 2), (*MXFP8, *schedule("1F1B"), *PAIRS)),
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
@pytest.mark.parametrize(
    ("table", "world_size"), [(LAYOUTS, 2), *(pytest.param(SOAK, size, marks=pytest.mark.soak) for size in (2, 4))]
)
def test_numbers_match_one_process(table: tuple[Layout, ...], world_size: int) -> None:
    layouts = [layout for layout in table if layout.world_size == world_size]
    for rank, found in enumerate(run_ranks(run, world_size, layouts)):
        for layout, errors in zip(layouts, found, strict=True):
            case = f"rank {rank}: {layout}: {errors}"
            assert errors["same_initial_weights"], case
            for key in ("gradient", "loss", "grad_norm", "trajectory"):
                assert errors[key] <= BOUNDS["float64"], case
            assert errors["learned"] > 1e-3, case


def planted(mistake: str) -> float:
    """The error of a layout whose ranks each have a part of the contraction. mistake: of `float8_product`."""

    def mistaken(x: Tensor, weight: Tensor, settings: Float8, which: ProductName) -> Tensor:
        maximum, of_rank = settings.maximum_of(which), replace(settings, maximum=None, gradient_maximum=None)
        result = float8_product(x, weight, of_rank, which)
        if maximum is None or mistake == "scale per rank":
            return result
        # The operand is divided by the scale of the rank, and multiplied by that of all ranks.
        own, common = (scales(each, "float32") for each in (largest(x), maximum(largest(x))))
        return result * (common / own)

    def largest(x: Tensor) -> Tensor:
        return x.abs().amax(-1, keepdim=True)

    with patch.object(float8, "float8_product", mistaken):
        return measure(CUT).gradient


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["scale per rank", "maximum after the cast"])
def test_scales_of_a_rank_are_found(mistake: str) -> None:
    assert min(run_ranks(planted, 2, mistake)) > 1e-3
