"""The training loop on two ranks: log rows, device reads, order of calls."""

import gc
import math
from time import monotonic
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from tests.distributed.gradients import build_on_mesh
from tests.distributed.reference import global_batch, rank_batches, reference_step, small_config
from tests.distributed.test_step import OperationCount
from tests.pool import run_ranks
from titanlite import train
from titanlite.assembly.run import Run, build_expert_loads
from titanlite.batch import Batch
from titanlite.config.schema import JobConfig
from titanlite.metrics.loggers import Loggers
from titanlite.metrics.meter import Meter, Work
from titanlite.metrics.records import Record
from titanlite.metrics.timing import Goodput
from titanlite.ranks.agreement import DataEnd
from titanlite.ranks.failure import FailureReport
from titanlite.ranks.signals import StopRequest
from titanlite.runtime.process_state import PacedGarbageCollection


class StubLoader:
    """Loader of test batches; wait times and numbers of bad rows differ by rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._step = 0
        self.wait_s = 0.0
        self.bad_rows = 0

    def next_step(self) -> list[Batch]:
        self._step += 1
        self.wait_s += 0.5 + self._rank
        self.bad_rows += 1 + self._rank
        return rank_batches(global_batch("uneven", self._step), self._rank, 2, 2)

    def epochs(self) -> list[float]:
        return []

    def too_long_by_name(self, *, counts: bool) -> dict[str, int]:
        return {"too_long/chat": (10 + self._rank) * counts}


class RecordLogger:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


def config_of_two(*settings: str) -> JobConfig:
    return small_config(2, "training.local_batch_size=4", "optimizer.name=AdamW", *settings)


def run_of(config: JobConfig, *loggers: RecordLogger) -> Run:
    """A run with the parts that every run has."""
    trainer, mesh = build_on_mesh(config)
    meter = Meter(mesh.data_group, torch.device("cpu"), work=lambda _: Work(256, 0.0), peak_flops=None)
    return Run(
        trainer=trainer,
        loader=StubLoader(dist.get_rank()),  # type: ignore[arg-type]
        meter=meter,
        expert_loads=build_expert_loads(config, trainer),
        goodput=Goodput({}, began=monotonic()),
        loggers=Loggers(loggers),  # type: ignore[arg-type]
        data_end=DataEnd(None, None),
        checks=Mock(),
        profiling=Mock(),
        ledger=None,
        checkpoints=None,
        stop=StopRequest(),
        validation=None,
        samples=None,
        memory=None,
        computed_by=None,
    )


def trained() -> tuple[list[Record], list[str]]:
    """(records, calls in order) of a run of 6 steps with a log line every 4 steps"""
    config = config_of_two("training.steps=6", "metrics.log_freq=4")
    logger, calls = RecordLogger(), []
    run = run_of(config, logger)
    trainer, meter = run.trainer, run.meter
    train_step, collect, start = trainer.train_step, gc.collect, meter.start

    def started() -> None:
        calls.append("the clock starts")
        start()

    def step(batches: Any) -> Any:
        calls.append(f"step {trainer.step + 1}")
        return train_step(batches)

    def collected(generation: int = 2) -> int:
        calls.append("gc")
        return collect(generation)

    trainer.train_step = step
    meter.start = started
    gc.collect = collected
    trainer.mesh.set_timeout = lambda _: calls.append("after the first step")  # type: ignore[method-assign]
    try:
        with patch.object(train, "PacedGarbageCollection", lambda: PacedGarbageCollection(interval=3)):
            train.train(config, run, FailureReport())
    finally:
        gc.collect = collect
    return logger.records, calls


def logged_and_called() -> tuple[list[list[float]], list[str]]:
    records, calls = trained()
    return [
        [r.step, r.loss, r.grad_norm, r.num_valid, r.tokens_seen, r.data_time_s, r.bad_rows] for r in records
    ], calls


@pytest.mark.slow
def test_rows_have_the_values_of_their_steps_over_the_mesh() -> None:
    first = global_batch("uneven", 1)
    reference = reference_step(config_of_two(), first)
    for rows, calls in run_ranks(logged_and_called, 2):
        assert [row[0] for row in rows] == [1, 4, 6]
        _, loss, grad_norm, num_valid, *_ = rows[0]
        assert math.isclose(loss, reference.loss.item(), rel_tol=1e-12)
        assert math.isclose(grad_norm, reference.grad_norm.item(), rel_tol=1e-12)
        assert [row[3] for row in rows] == [int((global_batch("uneven", n).labels != -100).sum()) for n in (1, 4, 6)]
        assert num_valid == int((first.labels != -100).sum())
        assert [row[4:] for row in rows] == [[256 * n, 1.5, 3 * n] for n in (1, 4, 6)]  # the slowest rank; both ranks
        assert [call for call in calls if call != "gc"] == [
            "the clock starts",
            "step 1",
            "after the first step",
            *(f"step {n}" for n in range(2, 7)),
        ]
        assert calls[calls.index("step 3") : calls.index("step 4")] == ["step 3", "gc"]
        assert calls.count("gc") == 2  # at the start and after step 3: the last step returns at once


def collectives_of_a_run(steps: int) -> dict[str, int]:
    """Collectives of a run with log lines at its first and last step only."""
    config = config_of_two(f"training.steps={steps}", "metrics.log_freq=1000")
    run = run_of(config)
    with OperationCount() as count:  # also fails if the host reads a tensor
        train.train(config, run, FailureReport())
    return {"allgather": count.collectives["allgather"], "norms and counts": count.collectives["allreduce"]}


def collectives_of_runs(lengths: list[int]) -> list[dict[str, int]]:
    return [collectives_of_a_run(steps) for steps in lengths]


@pytest.mark.slow
def test_between_log_lines_nothing_is_read_or_gathered() -> None:
    log_lines = 2
    expected = [{"allgather": 0, "norms and counts": 2 * steps + log_lines} for steps in (2, 7)]
    assert run_ranks(collectives_of_runs, 2, [2, 7]) == [expected] * 2
