"""Tasks on every mesh: the likelihood of each choice once, also if the number of rows is uneven."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.distributed.gradients import build_on_mesh
from tests.distributed.layouts import EP, EXPERTS, PAIRS, Layout, schedule
from tests.distributed.reference import SEQ_LEN, VOCAB_SIZE, plain_model
from tests.distributed.test_validation import COMPILE, differences, training_state
from tests.pool import run_ranks
from titanlite.assembly.data import build_evaluator
from titanlite.assembly.job import job_of
from titanlite.batch import IGNORE_INDEX, Batch
from titanlite.config.schema import JobConfig
from titanlite.evaluation import evaluator as evaluation
from titanlite.evaluation.evaluator import RowShape, Tasks, row_batches
from titanlite.evaluation.harness import Row
from titanlite.models.head import output_layers_of
from titanlite.models.losses import Loss, cross_entropy
from titanlite.parallel.mesh import Mesh
from titanlite.ranks.signals import StoppedError, StopRequest

DOUBLE = Loss("double", lambda logits, labels: 2 * cross_entropy(logits, labels))
NUM_ROWS = 13  # which no mesh divides


def rows_of(config: JobConfig) -> tuple[list[Row], list[Row]]:
    """Rows of 1 to seq_len inputs; of the second list, every second one is greedy."""
    model, generator = plain_model(config), torch.Generator().manual_seed(0)
    rows, greedy = [], []
    for number in range(NUM_ROWS):
        inputs = (1, SEQ_LEN, 2, 7, 9, 3, SEQ_LEN, 8, 8, 5, 1, 4, 12)[number]
        tokens = torch.randint(VOCAB_SIZE, (inputs + 1,), generator=generator)
        begin = 1 + (3 * number) % inputs
        rows.append(Row(tokens.numpy(), begin))
        if number % 2 == 0:
            tokens = tokens.clone()
            for place in range(begin, inputs + 1):
                with torch.no_grad():
                    tokens[place] = model(tokens[None, :place])[0, -1].argmax()
        greedy.append(Row(tokens.numpy(), begin))
    return rows, greedy


def expected(config: JobConfig, rows: list[Row]) -> list[float]:
    """The log-likelihood of each row, by plain torch."""
    model, found = plain_model(config), []
    for row in rows:
        tokens = torch.from_numpy(row.tokens)
        with torch.no_grad():
            scores = model(tokens[None, :-1])[0].log_softmax(-1)
        found.append(float(scores[row.begin - 1 :].gather(1, tokens[row.begin :, None]).sum()))
    return found


class Answers:
    """In place of the harness: the likelihoods that it is given, and whether they are of greedy tokens."""

    def scores(self, losses: Sequence[float], misses: Sequence[float], _: Any) -> dict[str, Any]:
        return {"sums": [-loss for loss in losses], "is_greedy": [count == 0 for count in misses]}


def scored(layout: Layout, planted: Callable[[], Any] = nullcontext) -> tuple[list[Any], list[str]]:
    """(results of both lists, then those of a model whose tokens are all equally likely; what has changed)

    The model is trained by another loss than the cross-entropy.
    """
    torch._dynamo.reset()
    config = layout.config()
    trainer, _ = build_on_mesh(config)
    stop = StopRequest()
    evaluator = build_evaluator(
        job_of(config, trainer.mesh.world.size), trainer, dist.new_group(backend="gloo"), stop, None
    )
    harness: Any = Answers() if dist.get_rank() == 0 else None
    both: list[Any] = [Tasks(harness, rows) for rows in rows_of(config)]
    heads = output_layers_of(trainer.model_parts)
    for head in heads:
        head.computation = replace(head.computation, loss=DOUBLE)
    before = training_state(trainer)
    with planted():
        found = [evaluator.scores(tasks) for tasks in both]
    changed = differences(before, training_state(trainer))
    for name, parameter in ((n, p) for part in trainer.model_parts for n, p in part.named_parameters()):
        if name == "output.weight":
            with torch.no_grad():
                parameter.zero_()
    found.append(evaluator.scores(both[1]))
    stop.number = 15
    with pytest.raises(StoppedError):
        evaluator.scores(both[0])
    assert all(head.computation.loss is DOUBLE and head.misses is None for head in heads)
    return found, changed


def all_scored(layouts: list[Layout]) -> list[Any]:
    return [scored(layout) for layout in layouts]


ONE = Layout((1, 1, 1, 1), accumulation=4)
TWO = (
    Layout((1, 1, 2, 1), accumulation=4),
    Layout((1, 1, 1, 2)),
    Layout((1, 1, 1, 1), cp=2),
    Layout((2, 1, 1, 1), (*schedule("Interleaved1F1B"), *PAIRS)),
)
OTHERS = (
    Layout((1, 2, 1, 1), COMPILE),
    Layout((1, 1, 2, 1), (*EXPERTS, *EP)),
    Layout((2, 1, 1, 1), schedule("ZBVZeroBubble")),
)
FOUR = (Layout((2, 1, 2, 1), schedule("1F1B")), Layout((1, 1, 2, 2), accumulation=8))


def is_right(layout: Layout, found: list[Any], changed: list[str]) -> bool:
    config = layout.config()
    rows, greedy = rows_of(config)
    uniform = [-math.log(VOCAB_SIZE) * (len(row.tokens) - row.begin) for row in greedy]
    return (
        changed == []
        and found[0]["sums"] == pytest.approx(expected(config, rows), rel=1e-12, abs=0)
        and found[1]["sums"] == pytest.approx(expected(config, greedy), rel=1e-12, abs=0)
        and found[1]["is_greedy"] == [number % 2 == 0 for number in range(NUM_ROWS)]
        and found[2]["sums"] == pytest.approx(uniform, rel=1e-12, abs=0)
        # Of equally likely tokens, the first one is the most likely.
        and found[2]["is_greedy"] == [bool((row.tokens[row.begin :] == 0).all()) for row in greedy]
    )


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param([ONE], id="one rank"),
        pytest.param(TWO, id="two ranks", marks=pytest.mark.slow),
        pytest.param(OTHERS, id="others of two", marks=pytest.mark.soak),
        pytest.param(FOUR, id="four ranks", marks=pytest.mark.soak),
    ],
)
def test_scores_are_those_of_plain_torch_on_every_mesh(layouts: list[Layout]) -> None:
    ranks = run_ranks(all_scored, layouts[0].world_size, list(layouts))
    for layout, *results in zip(layouts, *ranks, strict=True):
        assert all(found == results[0][0] for found, _ in results), layout
        assert is_right(layout, *results[0]), layout


def shifted() -> Any:
    """Labels begin one token late."""
    padded = evaluation._padded

    def late(rows: list[Row], per_rank: int, length: int) -> Batch:
        batch = padded(rows, per_rank, length)
        labels = torch.full_like(batch.labels, IGNORE_INDEX)
        labels[:, 1:] = batch.labels[:, :-1]
        return batch._replace(labels=labels)

    return patch.object(evaluation, "_padded", late)


def counted_twice() -> Any:
    """Rows of the first data rank are also counted by the others."""
    row_batches = evaluation.row_batches

    def all_rows(rows: list[Row], shape: RowShape, mesh: Mesh) -> Any:
        rank, mesh.data_rank = mesh.data_rank, 0
        yield from list(row_batches(rows, shape, mesh))
        mesh.data_rank = rank

    return patch.object(evaluation, "row_batches", all_rows)


def in_another_order() -> Any:
    """Rank 1 has the rows in another order."""
    row_batches = evaluation.row_batches

    def turned(rows: list[Row], shape: RowShape, mesh: Mesh) -> Any:
        yield from row_batches([*rows[mesh.world.rank :], *rows[: mesh.world.rank]], shape, mesh)

    return patch.object(evaluation, "row_batches", turned)


def with_other_examples() -> Any:
    """The contexts of rank 1 begin with other tokens."""
    row_batches = evaluation.row_batches

    def changed(rows: list[Row], shape: RowShape, mesh: Mesh) -> Any:
        starts = [(row.tokens[:1] + mesh.world.rank) % VOCAB_SIZE for row in rows]
        others = [np.concatenate([start, row.tokens[1:]]) for start, row in zip(starts, rows, strict=True)]
        yield from row_batches([Row(tokens, row.begin) for tokens, row in zip(others, rows, strict=True)], shape, mesh)

    return patch.object(evaluation, "row_batches", changed)


def planted_and_scored(layout: Layout, mistakes: list[Callable[[], Any]]) -> list[Any]:
    return [scored(layout, mistake) for mistake in mistakes]


@pytest.mark.slow
def test_mistakes_are_detected() -> None:
    for found, changed in run_ranks(
        planted_and_scored, 2, TWO[0], [shifted, counted_twice, in_another_order, with_other_examples]
    )[0]:
        assert not is_right(TWO[0], found, changed)


def test_short_rows_are_padded_to_lengths_of_their_own() -> None:
    """On any number of data ranks; all ranks have the same shapes."""
    shape = RowShape(3, 4096, is_fixed=False)
    assert [shape.length(n, 2) for n in (4096, 2049, 2048, 65, 64, 1)] == [4096, 4096, 2048, 128, 64, 32]
    assert RowShape(3, 4096, is_fixed=True).length(1, 1) == 4096
    assert RowShape(1, 96, is_fixed=False).length(1, 5) == 96
    rows = [Row(np.arange(1 + inputs), 1) for inputs in (200, 7, 100, 256, 30, 60, 31, 130, 5)]
    for ranks in (1, 2, 3):
        lengths: dict[int, int] = {}
        shapes = []
        for rank in range(ranks):
            mesh: Any = SimpleNamespace(degrees={"tp": 1}, data_rank=rank, data_degree=ranks)
            batches = list(row_batches(rows, RowShape(2, 256, is_fixed=False), mesh))
            shapes.append([batch.tokens.shape for _, batch, _ in batches])
            lengths |= {row: batch.tokens.shape[1] for own, batch, _ in batches for row in own.tolist()}
        assert [lengths[row] for row in range(len(rows))] == [256, 32, 128, 256, 32, 64, 32, 256, 32]
        assert all(each == shapes[0] for each in shapes)
