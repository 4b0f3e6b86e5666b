"""A registered loss with terms has the numbers of one process on every layout; planted mistakes are detected."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.custom_loss import LOSS, plain_objective, registered
from tests.distributed.gradients import build_without_updates, compare, difference, has_weights, local_batches
from tests.distributed.layouts import (
    BOUNDS,
    CHUNKS,
    COMPILE,
    EP,
    EVERY,
    EXPERTS,
    FULL,
    FURTHER,
    GATHER,
    LAST,
    PAIRS,
    TIED,
    Layout,
    depth,
    schedule,
)
from tests.distributed.mistakes import Around, Planted
from tests.distributed.reference import Reference, global_batch, plain_model
from tests.distributed.test_mistakes import first_difference, measured, references
from tests.plain_loss import further_term
from tests.pool import run_ranks
from titanlite import forward as forward_module
from titanlite import trainer as trainer_module
from titanlite.batch import IGNORE_INDEX, Batch
from titanlite.config.schema import JobConfig
from titanlite.models import head as head_module
from titanlite.models.head import CrossEntropy, Scoring
from titanlite.models.losses import Loss
from titanlite.parallel.mesh import PipelineSchedule
from titanlite.parallel.pipeline import SharedParameters
from titanlite.trainer import Trainer

SMOOTHED = (f"loss.name={LOSS.name}",)
Z_LOSS = ("loss.z_loss=0.1",)
TP = Layout((1, 1, 1, 2), (*SMOOTHED, *CHUNKS))
Z_LOSS_TP = Layout((1, 1, 1, 2), (*Z_LOSS, *CHUNKS))
FURTHER_PP = Layout((2, 1, 1, 1), (*FURTHER, *Z_LOSS, *schedule("InterleavedZeroBubble"), *depth(3), *CHUNKS))
FURTHER_CP = Layout((1, 1, 1, 1), (*FURTHER, *CHUNKS), cp=2)
SHARD = Layout((1, 1, 2, 1), (*SMOOTHED, *EVERY, *CHUNKS), accumulation=2, streams=9)  # has filler rows
LAYOUTS = (
    TP,
    SHARD,
    Layout((2, 1, 1, 1), (*SMOOTHED, *schedule("ZBVZeroBubble"), *depth(3), *PAIRS, *CHUNKS)),
    Layout((1, 1, 1, 1), (*SMOOTHED, *CHUNKS), cp=2),
    Z_LOSS_TP,
    Layout((1, 1, 1, 1), (*Z_LOSS, *GATHER), cp=2),
    FURTHER_PP,
)
SOAK_TWO = (
    Layout((1, 1, 1, 2), (*Z_LOSS, *CHUNKS, *COMPILE)),
    Layout((1, 2, 1, 1), (*Z_LOSS, *EVERY, *FULL), accumulation=2),
    Layout((2, 1, 1, 1), (*Z_LOSS, *schedule("InterleavedZeroBubble"), *PAIRS)),
)
SOAK = (
    Layout((1, 1, 2, 2), (*FURTHER, *SMOOTHED, *CHUNKS)),
    *(
        Layout((2, 1, 1, 2), (*SMOOTHED, *schedule(name), *depth(4), *PAIRS, *CHUNKS), accumulation=2)
        for name in PipelineSchedule.__args__
    ),
    Layout((2, 1, 2, 1), (*SMOOTHED, *schedule("InterleavedZeroBubble"), *depth(3)), streams=15),
    Layout((1, 2, 2, 1), (*SMOOTHED, *LAST), accumulation=3, rows=24),
    Layout((1, 1, 1, 2), (*SMOOTHED, *GATHER, *TIED), cp=2),
    Layout((1, 1, 2, 1), (*SMOOTHED, *LAST), accumulation=3, rows=24, cp=2),
    Layout((1, 1, 2, 2), (*SMOOTHED, *COMPILE)),
    Layout((1, 1, 4, 1), (*SMOOTHED, *EXPERTS, *EP)),
    Layout((2, 1, 1, 2), (*Z_LOSS, *schedule("ZBVZeroBubble"), *depth(4), *PAIRS, *CHUNKS), accumulation=2),
    Layout((1, 1, 1, 2), (*Z_LOSS, *GATHER, *TIED), cp=2),
)


def reference_of(config: JobConfig, batch: Batch) -> tuple[Reference, Tensor]:
    """The step of one process, and the terms of the loss."""
    model = plain_model(config)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    logits, further = further_term(model, batch, config.loss.further_tokens_weight, config.loss.chosen)
    objective, mean, terms = plain_objective(logits.flatten(0, 1), batch.labels.flatten(), config.loss.chosen)
    gradients = dict(zip(weights, torch.autograd.grad(objective + further, list(model.parameters())), strict=True))
    terms += [further] * model.predicts_further
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    return Reference(mean.detach(), norm, gradients, weights), torch.stack(terms).detach()


def errors_of(layout: Layout) -> dict[str, Any]:
    """Relative errors of two steps from the same weights, the second of other rows: see Errors; and of the terms."""
    config = layout.config("optimizer.lr=1e-30")
    trainer, mesh = build_without_updates(config)
    found = []
    for step in range(2):
        batch = global_batch("silent_ranks", step, layout.rows)
        reference, terms = reference_of(config, batch)
        stats = trainer.train_step(local_batches(config, mesh, batch))
        sums = torch.stack(list(stats.terms)).sum(1) if stats.terms else torch.zeros_like(terms)
        dist.all_reduce(sums)
        same = has_weights(trainer, reference.weights)
        errors = asdict(compare(trainer, stats.mean_loss, stats.grad_norm, reference, same))
        found.append(errors | {"terms": difference(sums, terms)})
    return {key: max(errors[key] for errors in found) for key in ("gradient", "loss", "grad_norm", "terms")}


def all_errors(layouts: Sequence[Layout]) -> list[dict[str, Any]]:
    with registered():
        return [errors_of(layout) for layout in layouts]


@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [
        pytest.param(2, LAYOUTS, marks=pytest.mark.slow),
        pytest.param(2, SOAK_TWO, marks=pytest.mark.soak),
        pytest.param(4, SOAK, marks=pytest.mark.soak),
    ],
    ids=["2", "2 more", "4"],
)
def test_numbers_match_one_process(world_size: int, layouts: Sequence[Layout]) -> None:
    for rank, found in enumerate(run_ranks(all_errors, world_size, layouts)):
        for layout, errors in zip(layouts, found, strict=True):
            print(f"rank {rank}, {layout.name}, {layout.schedule}: {max(errors.values()):.1e}")
            assert {key: error for key, error in errors.items() if not error <= BOUNDS["float64"]} == {}, (rank, layout)


# Mistakes -------------------------------------------------------------------------------------------------------------


def mean_of_each_microbatch() -> Planted:
    """A term is the mean over the microbatches of their means."""
    right = Trainer.forward_backward

    def forward_backward(trainer: Trainer, batch: Batch, num_valid: Tensor) -> Tensor:
        for head in trainer.heads_with_terms:
            head.denominators = head.computation.loss.counts(batch.labels) * 2 * dist.get_world_size()
        return right(trainer, batch, num_valid)

    return patch.object(Trainer, "forward_backward", forward_backward)


def counts_of_this_rank() -> Planted:
    """The denominators of terms are not summed over the data ranks."""

    def count(trainer: Trainer, batches: Sequence[Batch]) -> None:
        for head in trainer.heads_with_terms:
            head.start_step(torch.stack([head.computation.loss.counts(batch.labels) for batch in batches]).sum(0))

    return patch.object(Trainer, "count_terms", count)


def logits_of_this_rank() -> Planted:
    """The loss sees the logits of the rank's own part of the vocabulary only."""
    right = Scoring.scores

    def scores(scoring: Scoring, x: Tensor, weight: Tensor, buffer: Tensor) -> Any:
        found, backward = right(scoring, x, weight, buffer)
        own = torch.full_like(found, -1e3)
        own[:, scoring.start : scoring.start + len(weight)] = found[:, scoring.start : scoring.start + len(weight)]
        return own, backward

    return patch.object(Scoring, "scores", scores)


def filler_counts() -> Planted:
    """Tokens without a label count in the denominators."""

    def counts(loss: Loss, labels: Tensor) -> Tensor:
        return torch.stack([term.count(labels.flatten()).double().sum() for term in loss.terms.values()])

    return patch.object(Loss, "counts", counts)


@contextmanager
def z_loss_of_each_tp_rank() -> Iterator[None]:
    """Each rank of tp adds the z-loss of all ids."""
    right = CrossEntropy._slopes

    def slopes(scoring: CrossEntropy, logsumexp: Tensor, labels: Tensor, shares: Tensor) -> Any:
        assert scoring.group is not None
        return right(scoring, logsumexp, labels, shares * scoring.group.size())

    def term_shares(trainer: Trainer) -> list[Tensor]:
        sums = [head.term_sums for head in trainer.heads_with_terms if head.term_sums is not None]
        return [parts for each in sums for parts in each.unbind(1)]

    with patch.object(CrossEntropy, "_slopes", slopes), patch.object(Trainer, "term_shares", term_shares):
        yield


@contextmanager
def further_labels_of(change: Callable[[Batch, Tensor], Tensor]) -> Iterator[None]:
    """The labels of further tokens are those that `change` gives."""
    right = forward_module.further_labels

    def labels(batch: Batch) -> Tensor:
        return change(batch, right(batch))

    with patch.object(forward_module, "further_labels", labels), patch.object(trainer_module, "further_labels", labels):
        yield


def shifted_by_one() -> Planted:
    """The further token is the next one."""
    return further_labels_of(lambda batch, _: batch.labels)


def counted_in_loss() -> Planted:
    """The term of further tokens is a part of the loss."""

    def forward(_ctx: Any, losses: Tensor, term: Tensor) -> Tensor:
        return losses + term

    return patch.object(head_module._Objective, "forward", staticmethod(forward))


def shifted_after_the_split() -> Planted:
    """Each rank of cp shifts the labels of its own positions."""
    right = Trainer.forward_arguments

    def arguments(trainer: Trainer, batch: Batch, num_valid: Tensor) -> Any:
        found = right(trainer, batch, num_valid)
        own = found["labels"].roll(-1, dims=1)
        own[:, -1] = IGNORE_INDEX
        return found | {"further_labels": own}

    return patch.object(Trainer, "forward_arguments", arguments)


def shared_gradients_twice() -> Planted:
    """The gradient of the embedding that the last stage shares is added up twice."""
    right = SharedParameters.sum_gradients

    def twice(shared: SharedParameters) -> None:
        right(shared)
        right(shared)

    return patch.object(SharedParameters, "sum_gradients", twice)


MISTAKES: list[tuple[Layout, Around, set[str]]] = [
    (SHARD, mean_of_each_microbatch, {"gradient", "grad_norm", "terms"}),
    (SHARD, counts_of_this_rank, {"gradient", "grad_norm", "terms"}),
    (SHARD, filler_counts, {"gradient", "grad_norm", "terms"}),
    (TP, logits_of_this_rank, {"gradient", "grad_norm", "loss", "terms"}),
    (Z_LOSS_TP, z_loss_of_each_tp_rank, {"gradient", "grad_norm", "terms"}),
    (FURTHER_PP, shifted_by_one, {"gradient", "grad_norm", "terms"}),
    (FURTHER_PP, counted_in_loss, {"loss"}),
    (FURTHER_CP, shifted_after_the_split, {"gradient", "grad_norm", "terms"}),
    (FURTHER_PP, shared_gradients_twice, {"gradient", "grad_norm"}),
]


def found_mistakes(folder: str) -> dict[str, Any]:
    """By mistake, without and with it: the errors, and what `titanlite parity` measures; and its references."""
    results: list[list[Any]] = []
    expected = []
    with registered():
        for number, (layout, planted, _) in enumerate(MISTAKES):
            place = Path(folder, str(number))
            if dist.get_rank() == 0:
                place.mkdir()
            expected.append(references([layout], place))
            results.append([])
            for around in (nullcontext, planted):
                with around():
                    results[-1].append((errors_of(layout), measured(layout, place)))
    return {"results": results, "expected": expected}


@pytest.mark.soak
def test_mistakes_are_detected(tmp_path: Path) -> None:
    ranks = run_ranks(found_mistakes, 2, str(tmp_path))
    for number, (layout, planted, seen) in enumerate(MISTAKES):
        (expected,) = ranks[0]["expected"][number].values()
        for wrong in (False, True):
            errors, measurements = zip(*(rank["results"][number][wrong] for rank in ranks), strict=True)
            found = {key for each in errors for key, error in each.items() if not error <= BOUNDS["float64"]}
            first = first_difference(measurements, expected)
            print(f"| {planted.__name__} | {layout.name} | {wrong} | {errors[0]} | {first} |")
            assert found == (seen if wrong else set()), (planted, errors)
            assert bool(first) == wrong, (planted, first)
