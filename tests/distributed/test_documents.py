"""Rows of several documents have the loss and the gradients of the sum over the documents, each alone."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.documents import documents_step, documents_steps, packed_batch
from tests.distributed.gradients import replaced
from tests.distributed.layouts import (
    BY_LAYER,
    BY_OP,
    COMPILE,
    FULL,
    PAIRS,
    QWEN3,
    TIED,
    Layout,
    depth,
    runs_here,
    schedule,
)
from tests.pool import run_ranks
from titanlite.data.loader import Batch
from titanlite.models.attention import AttentionMask
from titanlite.models.decoder import model as decoder
from titanlite.trainer import Trainer

BOUND = 1e-12
INTERLEAVED = Layout((2, 1, 1, 1), (*schedule("Interleaved1F1B"), *PAIRS))
QUICK = (
    Layout((1, 1, 1, 1), accumulation=2),
    Layout((1, 1, 1, 1), (*FULL, *TIED)),
    Layout((1, 1, 1, 1), BY_OP),
    Layout((1, 1, 1, 2), (*QWEN3, *BY_OP)),
    INTERLEAVED,
)
SLOW = (
    Layout((1, 1, 1, 1), COMPILE),
    Layout((1, 1, 1, 1), (*COMPILE, *BY_OP)),
    Layout((1, 1, 2, 1), (*COMPILE, *FULL), accumulation=2),
    Layout((1, 2, 1, 1), BY_LAYER, accumulation=2),
    Layout((1, 1, 1, 2), BY_OP),
    Layout((1, 1, 1, 2), (*COMPILE, *BY_OP)),
    Layout((1, 1, 1, 2), (*QWEN3, *COMPILE, *FULL)),
    Layout((2, 1, 1, 1), (*schedule("1F1B"), *BY_OP)),
    Layout((2, 1, 1, 1), (*schedule("Interleaved1F1B"), *depth(3), *COMPILE, *BY_OP)),
    Layout((2, 1, 1, 1), (*schedule("InterleavedZeroBubble"), *COMPILE, *PAIRS)),
    Layout((2, 1, 1, 1), schedule("ZBVZeroBubble")),
    Layout((2, 1, 1, 1), (*schedule("DualPipeV"), *FULL)),
    Layout((2, 1, 1, 2), (*schedule("Interleaved1F1B"), *BY_OP)),
    Layout((2, 1, 1, 2), (*schedule("1F1B"), *COMPILE, *FULL)),
)


@pytest.mark.parametrize(
    ("world_size", "table"),
    [(1, QUICK), (2, QUICK), *(pytest.param(size, SLOW, marks=pytest.mark.slow) for size in (1, 2, 4))],
)
def test_packed_documents_are_the_documents_alone(world_size: int, table: Sequence[Layout]) -> None:
    layouts = [layout for layout in table if layout.world_size == world_size and runs_here(layout)]
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


attention_mask = decoder.attention_mask


def without_mask(_ids: Tensor | None, _dtype: torch.dtype, _head_dim: int) -> None:
    """Attention leaks into all documents before."""


def one_position_late(ids: Tensor | None, dtype: torch.dtype, head_dim: int) -> AttentionMask | None:
    """A document's first token belongs to the one before."""
    return attention_mask(None if ids is None else torch.cat((ids[:, :1], ids[:, :-1]), 1), dtype, head_dim)


def of_the_first_row(ids: Tensor | None, dtype: torch.dtype, head_dim: int) -> AttentionMask | None:
    """All rows of a microbatch have the documents of its first one."""
    return attention_mask(None if ids is None else ids[:1].expand_as(ids), dtype, head_dim)


LEAKS: tuple[Callable[..., Any], ...] = (without_mask, one_position_late, of_the_first_row)


def last_part_is_not_told(trainer: Trainer) -> None:
    """Of each rank's parts of the model, the last one takes its rows for one document each."""
    forward = trainer.model_parts[-1].forward
    trainer.model_parts[-1].forward = lambda tokens, **_keys: forward(tokens)  # type: ignore[method-assign]


def positions_go_on(trainer: Trainer) -> None:
    """Those of a row instead of those in a document; attention still stays inside documents."""
    keys_of = trainer.keys_of

    def along_the_row(batch: Batch) -> dict[str, Tensor]:
        keys = keys_of(batch)
        keys["positions"] = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
        return keys

    trainer.keys_of = along_the_row  # type: ignore[method-assign]


def planted() -> dict[str, dict[str, Any]]:
    """What is found of each mistake."""
    found = {}
    for leak in LEAKS:
        with replaced(decoder, "attention_mask", leak):
            found[leak.__name__] = documents_step(INTERLEAVED)
    for mutate in (last_part_is_not_told, positions_go_on):
        found[mutate.__name__] = documents_step(INTERLEAVED, mutate)
    return found


def test_planted_mistakes_are_found() -> None:
    ranks = run_ranks(planted, 2)
    for name in (*(leak.__name__ for leak in LEAKS), "last_part_is_not_told"):
        assert max(rank[name]["gradient"] for rank in ranks) > 1e-3, name
    for rank in ranks:
        assert rank["without_mask"]["restarts"]
        assert not rank["last_part_is_not_told"]["restarts"]
        assert not rank["positions_go_on"]["restarts"]
        assert rank["positions_go_on"]["gradient"] <= BOUND
