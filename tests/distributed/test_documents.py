"""Packed rows have the loss and the gradients of the sum over their separate documents."""

from collections.abc import Sequence

import pytest

from tests.distributed.documents import documents_steps, packed_batch
from tests.distributed.layouts import (
    BY_LAYER,
    BY_OP,
    COMPILE,
    FULL,
    FURTHER,
    GATHER,
    GEMMA2,
    MISTRAL,
    PAIRS,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    TIED,
    Layout,
    depth,
    is_supported,
    schedule,
)
from tests.pool import run_ranks

BOUND = 1e-12
INTERLEAVED = Layout((2, 1, 1, 1), (*schedule("Interleaved1F1B"), *PAIRS))
QUICK = (
    Layout((1, 1, 1, 1), accumulation=2),
    Layout((1, 1, 1, 1), (*FULL, *TIED)),
    Layout((1, 1, 1, 1), (*MISTRAL, *BY_OP)),
    Layout((1, 1, 1, 2), (*QWEN3, *BY_OP)),
    INTERLEAVED,
    Layout((1, 1, 1, 1), cp=2),
    Layout((1, 1, 1, 1), GATHER, cp=2),
)
FURTHER_TOKENS = (*FURTHER, "model.balance_loss=0.0")
SLOW = (
    Layout((1, 1, 1, 1), (*GATHER, *FURTHER_TOKENS), cp=2),
    Layout((1, 1, 1, 2), (*QWEN3_5, *BY_OP)),
    Layout((1, 1, 1, 1), (*GATHER, *QWEN3_5), cp=2),
    Layout((2, 1, 1, 1), (*QWEN3_5, *schedule("ZBVZeroBubble"), *depth(3)), cp=2),
    Layout((1, 1, 1, 1), (*GEMMA2, *COMPILE, *BY_OP)),
    Layout((1, 1, 2, 1), FULL, accumulation=2),
    Layout((2, 1, 1, 1), schedule("ZBVZeroBubble")),
    Layout((2, 1, 1, 2), (*schedule("Interleaved1F1B"), *BY_OP)),
    Layout((2, 1, 1, 2), (*schedule("1F1B"), *FULL)),
    Layout((1, 1, 1, 1), BY_OP, accumulation=2, cp=4),
    Layout((1, 1, 1, 2), MISTRAL, cp=2),
    Layout((2, 1, 1, 1), (*schedule("1F1B"), *BY_OP), cp=2),
    Layout((1, 1, 1, 2), (*GATHER, *GEMMA2, *BY_OP), cp=2),
    Layout((2, 1, 1, 1), (*GATHER, *MISTRAL, *schedule("DualPipeV")), cp=2),
)


SOAK = (
    Layout((1, 2, 1, 1), BY_LAYER, accumulation=2),
    Layout((1, 1, 1, 2), (*QWEN3, *FULL)),
    Layout((2, 1, 1, 1), (*schedule("1F1B"), *BY_OP)),
    Layout((2, 1, 1, 1), (*schedule("DualPipeV"), *FULL)),
    Layout((1, 1, 1, 1), FURTHER_TOKENS, cp=2),
    Layout((2, 1, 1, 1), (*FURTHER_TOKENS, *schedule("ZBVZeroBubble"), *depth(3))),
    Layout((1, 1, 1, 2), FURTHER_TOKENS),
    Layout((1, 1, 1, 1), (*QWEN3_5, *COMPILE, *FULL), cp=2),
    Layout((1, 1, 2, 1), (*QWEN3_5_MOE, "model.balance_loss=0.0", *BY_OP)),
    Layout((1, 1, 1, 2), BY_OP),
    Layout((2, 1, 1, 1), (*schedule("Interleaved1F1B"), *depth(3), *BY_OP)),
    Layout((2, 1, 1, 1), (*schedule("InterleavedZeroBubble"), *COMPILE, *PAIRS)),
    Layout((1, 1, 1, 1), (*COMPILE, *FULL), cp=2),
    Layout((1, 1, 1, 1), (*GATHER, *COMPILE, *FULL), cp=2),
)


@pytest.mark.parametrize(
    ("world_size", "table"),
    [
        (1, QUICK),
        *(pytest.param(size, table, marks=pytest.mark.slow) for size, table in ((1, SLOW), (2, (*QUICK, *SLOW)))),
        *(pytest.param(size, table, marks=pytest.mark.soak) for size, table in ((2, SOAK), (4, SLOW))),
    ],
)
def test_packed_documents_match_separate_documents(world_size: int, table: Sequence[Layout]) -> None:
    layouts = [layout for layout in table if layout.world_size == world_size and is_supported(layout)]
    for rank, found in enumerate(run_ranks(documents_steps, world_size, layouts)):
        for layout, errors in zip(layouts, found, strict=True):
            case = f"rank {rank}: {layout}: {errors}"
            assert errors["same_initial_weights"], case
            assert errors["restarts"], case
            for key in ("gradient", "loss", "grad_norm"):
                assert errors[key] <= BOUND, case


def test_the_batch_has_documents_of_all_kinds() -> None:
    positions = packed_batch(16).positions
    assert positions is not None
    starts = (positions == 0).sum(1)
    assert {1, 2, positions.shape[1]} < set(starts.tolist())
