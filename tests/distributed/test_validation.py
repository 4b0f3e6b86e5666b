"""Validation on every mesh: it counts each token once, uses the current weights and does not affect training."""

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional

from tests.distributed.gradients import build_on_mesh, local_batches
from tests.distributed.layouts import (
    BY_OP,
    COMPILE,
    FULL,
    LAST,
    PAIRS,
    TIED,
    Layout,
    depth,
    is_supported,
    schedule,
    split,
)
from tests.distributed.reference import SEQ_LEN, TOKENS, VOCAB_SIZE, global_batch, plain_model
from tests.pool import run_ranks
from titanlite.assembly.data import build_evaluator, build_validation_data
from titanlite.assembly.job import job_of
from titanlite.batch import IGNORE_INDEX, Batch
from titanlite.data.loader import Loader
from titanlite.evaluation.evaluator import Evaluator
from titanlite.ranks.signals import StopRequest
from titanlite.trainer import Trainer

SETS = {"two batches": 16 * 21 + 6, "three windows": 16 * 3 + 1, "two tokens": 3}
"""Number of tokens by set; a global batch is 16 windows of 16."""
BYTES = 1 + torch.arange(VOCAB_SIZE) % 2
LIMITS = (-1, -1, 1)
"""Maximum number of batches of each validation; -1: no limit."""
SETTINGS = ("optimizer.lr=0.5", "optimizer.weight_decay=0.0", "validation.enable=true")
NEVER = ("parallelism.fsdp_reshard_after_forward=never",)
LAYOUTS = tuple(
    layout
    for layout in (
        Layout((1, 1, 1, 1), accumulation=4),
        Layout((1, 1, 1, 1), (*COMPILE, *FULL)),
        Layout((1, 2, 1, 1), (*COMPILE, *TIED), accumulation=2),
        Layout((1, 1, 2, 1), NEVER, accumulation=2),
        Layout((1, 1, 2, 1), (*COMPILE, *BY_OP, *LAST), accumulation=2),
        Layout((1, 1, 1, 2), (*COMPILE, *FULL), accumulation=2),
        Layout((1, 1, 1, 2)),
        Layout((2, 1, 1, 1), (*schedule("1F1B"), *PAIRS, *COMPILE)),
        Layout((2, 1, 1, 1), (*schedule("Interleaved1F1B"), *LAST), accumulation=2),
        Layout((2, 1, 1, 1), (*schedule("InterleavedZeroBubble"), *FULL)),
        Layout((2, 1, 1, 1), schedule("ZBVZeroBubble")),
        Layout((2, 1, 1, 1), schedule("DualPipeV")),
        Layout((2, 1, 2, 1), (*schedule("DualPipeV"), *depth(7))),
        Layout((2, 1, 1, 2), schedule("1F1B")),
        Layout((2, 2, 1, 1), (*schedule("GPipe"), *NEVER)),
        Layout((1, 2, 2, 1), NEVER, accumulation=2),
        Layout((4, 1, 1, 1), (*schedule("LoopedBFS"), *depth(6), *PAIRS)),
        Layout((4, 1, 1, 1), (*schedule("GPipe"), *split("layers.0", "layers.1", "norm"))),
    )
    if is_supported(layout)
)


def write_sets(folder: Path) -> tuple[str, ...]:
    """Write the sets; return their settings."""
    tokens = np.load(TOKENS)
    settings = list(SETTINGS)
    for index, (name, length) in enumerate(SETS.items()):
        np.save(folder / f"{index}.npy", tokens[1000 * index :][:length])
        table = {"kind": "tokens", "path": folder / f"{index}.npy", "name": name}
        settings += [f"validation.sources.{index}.{key}={value}" for key, value in table.items()]
    return tuple(settings)


def evaluate(evaluator: Evaluator, loaders: Iterable[Loader], steps: int = -1) -> list[list[float]]:
    """[sum of losses, number of targets, number of bytes] of each set"""
    found = []
    for loader in loaders:
        totals, bad_rows = evaluator.totals(loader, steps=steps)
        assert bad_rows == 0
        found.append([totals.loss_sum, totals.num_valid, totals.num_bytes])
    return found


def training_state(trainer: Trainer) -> dict[str, Any]:
    """State that validation must not change."""
    named = {name: p for part in trainer.model_parts for name, p in part.named_parameters()}
    tensors = {f"weight {name}": p.detach() for name, p in named.items()}
    tensors |= {f"gradient {name}": p.grad for name, p in named.items() if p.grad is not None}
    tensors["random numbers of torch"] = torch.get_rng_state()
    local = {name: (t.to_local() if isinstance(t, DTensor) else t).clone() for name, t in tensors.items()}
    modes = [module.training for part in trainer.model_parts for module in part.modules()]
    return local | {"random numbers of Python": random.getstate(), "modes": modes}


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    return [name for name in left.keys() | right.keys() if not same(left.get(name), right.get(name))]


def same(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(left, Tensor) and isinstance(right, Tensor) else bool(left == right)


def trained(
    layout: Layout, settings: tuple[str, ...], *, validates: bool
) -> tuple[list[Any], list[str], dict[str, Any]]:
    """(validations before, between and after two steps; their changes; losses, norms and final state)"""
    torch._dynamo.reset()
    config = layout.config(*settings)
    trainer, mesh = build_on_mesh(config)
    job = job_of(config, mesh.world.size)
    loaders = build_validation_data(job, mesh, None).values()
    evaluator = build_evaluator(job, trainer, dist.new_group(backend="gloo"), StopRequest(), None)
    evaluator = replace(evaluator, token_bytes=BYTES)
    row_losses = trainer.row_losses

    def without_graph(batch: Batch) -> Tensor:
        losses = row_losses(batch)
        assert not losses.requires_grad
        return losses

    trainer.row_losses = without_graph  # type: ignore[method-assign]
    validations, changed, numbers = [], [], {}
    for step in range(3):
        if validates:
            before = training_state(trainer)
            validations.append(evaluate(evaluator, loaders, LIMITS[step]))
            changed += [f"{name} before step {step}" for name in differences(before, training_state(trainer))]
        if step < 2:
            stats = trainer.train_step(local_batches(config, mesh, global_batch("silent_ranks", step)))
            numbers |= {f"loss {step}": stats.mean_loss.clone(), f"norm {step}": stats.grad_norm.clone()}
    for loader in loaders:
        loader.close()
    return validations, changed, numbers | training_state(trainer)


def all_trained(layouts: list[Layout], settings: tuple[str, ...]) -> list[Any]:
    found = []
    for layout in layouts:
        validations, changed, validated = trained(layout, settings, validates=True)
        _, _, plain = trained(layout, settings, validates=False)
        found.append((validations, changed + differences(plain, validated)))
    return found


def expected(layout: Layout, settings: tuple[str, ...], folder: Path) -> list[list[list[float]]]:
    """Validations by plain torch in one process, window by window; updates are plain gradient descent."""
    config = layout.config(*settings)
    model = plain_model(config)
    parameters = list(model.parameters())
    found = []
    for step in range(3):
        windows = None if LIMITS[step] < 0 else LIMITS[step] * layout.rows
        with torch.no_grad():
            sets = [torch.from_numpy(np.load(folder / f"{n}.npy")).to(torch.int64) for n in range(len(SETS))]
            found.append([exact(model, tokens, windows) for tokens in sets])
        batch = global_batch("silent_ranks", step)
        scores = model(batch.tokens).flatten(0, 1)
        total = functional.cross_entropy(scores, batch.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        gradients = torch.autograd.grad(total / (batch.labels != IGNORE_INDEX).sum(), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(config.optimizer.lr * gradient)
    return found


def exact(model: Any, tokens: Tensor, limit: int | None) -> list[float]:
    loss, targets, num_bytes = 0.0, 0, 0
    for begin in list(range(0, len(tokens) - 1, SEQ_LEN))[:limit]:
        window = tokens[begin : begin + SEQ_LEN + 1]
        scores = model(window[None, :-1])[0].log_softmax(-1)
        loss -= float(scores.gather(1, window[1:, None]).sum())
        targets += len(window) - 1
        num_bytes += int(BYTES[window[1:]].sum())
    return [loss, targets, num_bytes]


TWO = (
    Layout((1, 1, 2, 1), accumulation=2, streams=9),
    Layout((1, 1, 1, 2)),
    Layout((1, 1, 1, 1), cp=2),
    Layout((2, 1, 1, 1), schedule("Interleaved1F1B")),
)
FOUR = (Layout((1, 2, 2, 1), NEVER, accumulation=2),)


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(LAYOUTS[:1], id="one rank"),
        pytest.param(LAYOUTS[1:2], id="one rank, compiled", marks=pytest.mark.soak),
        pytest.param(TWO, id="two ranks", marks=pytest.mark.slow),
        pytest.param([layout for layout in LAYOUTS if layout.world_size == 2], id="all of two", marks=pytest.mark.soak),
        pytest.param(FOUR, id="four ranks", marks=pytest.mark.soak),
        pytest.param(
            [layout for layout in LAYOUTS if layout.world_size == 4], id="all of four", marks=pytest.mark.soak
        ),
    ],
)
def test_validation_is_exact_and_does_not_affect_training(layouts: list[Layout], tmp_path: Path) -> None:
    settings = write_sets(tmp_path)
    for ranks in run_ranks(all_trained, layouts[0].world_size, layouts, settings):
        for layout, (validations, changed) in zip(layouts, ranks, strict=True):
            assert changed == [], layout
            wanted = expected(layout, settings, tmp_path)
            assert wanted[0][0] != wanted[1][0]
            assert [totals[1] for totals in wanted[0]] == [length - 1 for length in SETS.values()]
            assert wanted[2][0][1] == 16 * 16
            for found, right in zip(validations, wanted, strict=True):
                for (loss, *counts), (right_loss, *right_counts) in zip(found, right, strict=True):
                    assert counts == right_counts, layout
                    assert loss == pytest.approx(right_loss, rel=1e-12, abs=0), layout


def around_updates(settings: tuple[str, ...]) -> list[list[float]]:
    """Losses around an update, without and with a planted mistake."""
    return [around_an_update(settings, planted) for planted in (False, True)]


def around_an_update(settings: tuple[str, ...], planted: bool) -> list[float]:
    """Loss on the first set before and after halving all weights. planted: parameters stay gathered."""
    layout = Layout((1, 1, 2, 1), NEVER, rows=16)
    trainer, mesh = build_on_mesh(layout.config(*settings))
    job = job_of(layout.config(*settings), mesh.world.size)
    loaders = build_validation_data(job, mesh, None)
    evaluator = build_evaluator(job, trainer, dist.new_group(backend="gloo"), StopRequest(), None)
    shards = [parameter.data for parameter in trainer.model_parts[0].parameters()]
    found = []
    with patch.object(FSDPModule, "reshard", (lambda _: None) if planted else FSDPModule.reshard):
        for _ in range(2):
            found.append(evaluate(evaluator, list(loaders.values())[:1])[0][0])
            for shard in shards:
                shard.mul_(0.5)
    for loader in loaders.values():
        loader.close()
    return found


@pytest.mark.slow
def test_validation_uses_the_current_weights(tmp_path: Path) -> None:
    settings = write_sets(tmp_path)
    right, stale = run_ranks(around_updates, 2, settings)[0]
    model = plain_model(LAYOUTS[0].config(*settings))
    tokens = torch.from_numpy(np.load(tmp_path / "0.npy")).to(torch.int64)
    with torch.no_grad():
        for n in range(2):
            expected_loss = exact(model, tokens, None)[0]
            assert right[n] == pytest.approx(expected_loss, rel=1e-12)
            for parameter in model.parameters():
                parameter.mul_(0.5)
    assert stale == [right[0], right[0]] != right
