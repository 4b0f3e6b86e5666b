"""Uneven conversations have the same loss and gradients on every layout: that of the mean over all trained tokens."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed.conversations import ANSWERS, chat_steps, planted_step, validation_counts, write_data
from tests.distributed.layouts import GATHER, PAIRS, Layout, schedule
from tests.pool import run_ranks

BOUND = 1e-11
CASES = (
    (Layout((1, 1, 1, 1), accumulation=2, rows=8), False),
    (Layout((1, 1, 2, 1), rows=8), False),
    (Layout((2, 1, 1, 1), PAIRS, rows=8), True),
    (Layout((1, 1, 1, 1), rows=8), True),
    (Layout((1, 1, 1, 2), rows=8), False),
    (Layout((1, 1, 1, 1), rows=8, cp=2), False),
    (Layout((1, 1, 1, 1), GATHER, rows=8, cp=2), True),
)
SOAK = (
    (Layout((1, 2, 2, 1), rows=8), True),
    (Layout((2, 1, 1, 2), schedule("1F1B"), rows=8), False),
    (Layout((1, 1, 2, 2), rows=8), False),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made: Path = tmp_path_factory.mktemp("conversations")
    write_data(made)
    return str(made)


@pytest.mark.parametrize(
    ("world_size", "table"),
    [
        *(pytest.param(size, CASES, marks=pytest.mark.slow) for size in (1, 2)),
        pytest.param(4, SOAK, marks=pytest.mark.soak),
    ],
)
def test_every_layout_has_the_gradients_of_the_mean_over_tokens(
    world_size: int, table: Sequence[tuple[Layout, bool]], folder: str
) -> None:
    cases = [(layout, mixture) for layout, mixture in table if layout.world_size == world_size]
    for found in run_ranks(chat_steps, world_size, cases, folder):
        for case, errors in zip(cases, found, strict=True):
            assert errors["same_initial_weights"], (case, errors)
            assert max(errors["gradient"], errors["loss"], errors["grad_norm"]) <= BOUND, (case, errors)
            numbers = errors["numbers"]
            assert min(numbers) <= 2
            assert max(numbers) >= 500
            assert set(errors["sources"]) == ({0, 1} if case[1] else {0})


@pytest.mark.slow
def test_a_mean_over_rows_is_seen_with_its_size(folder: str) -> None:
    (found,) = run_ranks(planted_step, 1, Layout((1, 1, 1, 1), rows=8), folder)
    errors, size = found
    assert errors["gradient"] > 0.5
    assert errors["loss"] == pytest.approx(size, rel=1e-6)


def test_the_answers_have_1_to_500_tokens() -> None:
    assert (min(ANSWERS), max(ANSWERS)) == (1, 500)


@pytest.mark.slow
def test_a_validation_counts_conversations_that_are_too_long_once(folder: str) -> None:
    """An answer begins at token 22."""
    seq_len = 128
    layouts = [Layout((1, 1, 2, 1), rows=8), Layout((2, 1, 1, 1), rows=8)]
    expected = [sum(min(n, seq_len + 1 - 22) for n in ANSWERS), sum(22 + n + 1 > seq_len + 1 for n in ANSWERS)]
    for chat, text, *second in run_ranks(validation_counts, 2, layouts, folder, seq_len):
        assert chat == expected
        assert text[1] is None
        assert second == [chat, text]
