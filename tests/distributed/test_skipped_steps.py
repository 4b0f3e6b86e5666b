"""Skipped steps: what the log says about them, and the limits at which the run stops; through the real loop."""

import logging
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.reference import SEQ_LEN, TOKENS, small_config
from tests.distributed.test_build import build
from tests.pool import run_ranks
from titanlite.batch import IGNORE_INDEX, Batch
from titanlite.checkpoint.folder import published_steps
from titanlite.models.head import OutputLayer
from titanlite.runtime.errors import UserError
from titanlite.runtime.torch_internals import local_part
from titanlite.train import train

GLOBAL_BATCH = 8
BAD_ROW = 3


class Overflow(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor) -> Tensor:  # noqa: ARG004
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return gradient * float("inf")


def trained(folder: str, fault: str, first: int, last: int, *settings: str) -> tuple[list[str], str, float, int]:
    """Train 8 steps by default, with a fault on the last rank in steps first to last.

    Returns the warnings, the error, the change of the weights in the steps with a fault, and the last step.
    """
    batch = f"training.global_batch_size={GLOBAL_BATCH}"
    settings = ("data.shuffle=false", "training.steps=8", "metrics.log_freq=4", batch, *settings)
    run = build(folder, *settings)
    rows = GLOBAL_BATCH // run.trainer.mesh.data_degree
    is_faulty = dist.get_rank() == dist.get_world_size() - 1
    trainer, warnings, calls = run.trainer, list[str](), 0
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    handler.setLevel(logging.WARNING)
    logging.getLogger("titanlite").addHandler(handler)

    def with_fault(_head: OutputLayer, _inputs: Any, shares: Tensor) -> Tensor:
        nonlocal calls
        row = calls % rows
        calls += 1
        if not (is_faulty and first <= trainer.step <= last):
            return shares
        if fault == "nan" and row == BAD_ROW:
            return shares * float("nan")
        return Overflow.apply(shares) if fault == "overflow" else shares  # type: ignore[no-any-return,no-untyped-call]

    for module in (module for part in trainer.model_parts for module in part.modules()):
        if isinstance(module, OutputLayer):
            module.register_forward_hook(with_fault)
    weights, changes, train_step = _weights(run), 0.0, trainer.train_step

    def step(batches: list[Batch]) -> Any:
        nonlocal weights, changes
        if fault == "masked" and first <= trainer.step + 1 <= last:
            batches = [batch._replace(labels=torch.full_like(batch.labels, IGNORE_INDEX)) for batch in batches]
        stats = train_step(batches)
        now = _weights(run)
        if first <= trainer.step <= last:
            changes += (now - weights).abs().sum().item()
        weights = now
        return stats

    trainer.train_step = step  # type: ignore[method-assign]
    error = ""
    try:
        train(small_config(dist.get_world_size(), f"job.dump_folder={folder}/run", *settings), run, Mock())
    except UserError as raised:
        error = str(raised)
    logging.getLogger("titanlite").removeHandler(handler)
    run.loader.close()
    run.loggers.close()
    return warnings, error, changes, trainer.step


def _weights(run: Any) -> Tensor:
    return torch.cat([local_part(p).flatten() for part in run.trainer.model_parts for p in part.parameters()])


Case = tuple[str, int, int, tuple[str, ...]]
"""The fault, its first and last step, settings."""


def trained_in_turn(folder: str, cases: list[Case]) -> list[tuple[list[str], str, float, int]]:
    results = []
    for number, (fault, first, last, settings) in enumerate(cases):
        Path(folder, str(number)).mkdir(exist_ok=True)
        results.append(trained(f"{folder}/{number}", fault, first, last, *settings))
    return results


SHARDED, STAGES, POSITIONS = "parallelism.dp_shard=2", "parallelism.pp=2", "parallelism.cp=2"
FIRST_GRADIENT = r"  first gradient that is not finite: tok_embeddings.weight, on rank [01]\n"


def sample(sequence: int, rank: int = 1) -> str:
    return f"rank {rank}, sequence {sequence}, data.sources.0: {TOKENS}, token {sequence * SEQ_LEN}\n"


@pytest.mark.slow
def test_a_skipped_step_is_explained(tmp_path: Path) -> None:
    short = ("training.steps=4", "metrics.log_freq=4")
    cases: list[Case] = [
        ("nan", 3, 3, (SHARDED, *short)),
        ("nan", 3, 3, (STAGES, *short)),
        ("overflow", 2, 3, (SHARDED, *short)),
        ("masked", 4, 4, (SHARDED, *short)),
        ("nan", 3, 3, (POSITIONS, *short)),
    ]
    on_rank_0, on_rank_1 = run_ranks(trained_in_turn, 2, str(tmp_path), cases)
    for (fault, *_), (warnings, error, changes, step), (silent, *others) in zip(
        cases, on_rank_0, on_rank_1, strict=True
    ):
        assert (error, step) == ("", 4), fault
        assert others == [error, changes, step]
        assert silent == []
        assert changes == 0, fault
        assert len(warnings) == 1, fault
    shown = [warnings[0] for warnings, *_ in on_rank_0]
    not_finite = "step 3 was skipped: its loss or its gradient norm is not finite\n"
    # with cp, the rank of the first positions is named: it counts the losses of entire rows
    samples = (sample(23), sample(19), sample(19, rank=0))
    for text, expected_sample in zip((*shown[:2], shown[4]), samples, strict=True):
        expected = re.escape(not_finite) + FIRST_GRADIENT + re.escape(f"  loss that is not finite: {expected_sample}")
        hint = r"  to compute it again: titanlite replay \S+/run --step 3\n"
        assert re.fullmatch(expected + hint + "  training continues", text), text
    assert "step 2 was skipped" in shown[2]
    assert "the loss of every sequence is finite: the backward pass overflowed\n" in shown[2]
    assert "  2 steps were skipped since the last log line\n" in shown[2]
    assert shown[3] == ("step 4 was skipped: no token of its global batch counts in the loss\n  training continues")


def saved_before_the_stop(folder: str) -> tuple[str, list[int]]:
    settings = (SHARDED, "faults.max_skipped_steps=0", "checkpoint.enable=true", "checkpoint.interval=3")
    _, error, _, _ = trained(folder, "nan", 2, 2, *settings)
    return error, published_steps(Path(folder, "run", "checkpoint"))


@pytest.mark.slow
def test_no_checkpoint_is_saved_after_a_step_that_stops_the_run(tmp_path: Path) -> None:
    """The save of step 3 comes before the log line of step 4."""
    for error, steps in run_ranks(saved_before_the_stop, 2, str(tmp_path)):
        assert "faults.max_skipped_steps = 0: 1 steps in a row were skipped; skipped steps did not change" in error
        assert steps == []


def norms_after(folder: str, steps: int, *settings: str) -> list[float]:
    """Train up to a step; the known gradient norms then."""
    one_batch = ("training.local_batch_size=8", SHARDED)
    settings = ("checkpoint.enable=true", f"training.steps={steps}", *one_batch, *settings)
    run = build(folder, *settings)
    train(small_config(dist.get_world_size(), f"job.dump_folder={folder}/run", *settings), run, Mock())
    run.loader.close()
    run.loggers.close()
    Path(folder, "store").unlink(missing_ok=True)
    return [] if run.trainer.spikes is None else run.trainer.spikes.norms[1 : steps + 1].tolist()


def norms_of_resumed_runs(folder: str) -> list[list[float]]:
    spikes = ("faults.spike_factor=4.0",)
    for name in ("one", "two", "three"):
        Path(folder, name).mkdir(exist_ok=True)
    return [
        norms_after(f"{folder}/one", 5, *spikes),
        norms_after(f"{folder}/two", 3, *spikes),
        norms_after(f"{folder}/two", 5, *spikes),
        norms_after(f"{folder}/three", 3),
        norms_after(f"{folder}/three", 5, *spikes),
    ]


@pytest.mark.slow
def test_known_norms_are_saved_with_a_checkpoint(tmp_path: Path) -> None:
    """Also a run whose checkpoint has none may begin to detect spikes."""
    for all_norms, first, resumed, without, begun in run_ranks(norms_of_resumed_runs, 2, str(tmp_path)):
        assert all(norm > 0 for norm in all_norms)
        assert (first, resumed, without) == (all_norms[:3], all_norms, [])
        assert begun[:3] == [-1.0] * 3
        assert begun[3:] == all_norms[3:]
