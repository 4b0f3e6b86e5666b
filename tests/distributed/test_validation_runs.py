"""Runs with validation: training as without it, and one row per validation in spite of interruptions."""

import signal
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from tests.distributed.reference import TOKENS
from tests.distributed.resuming import Outcome, Start, numbers, start_runs
from tests.pool import run_ranks
from titanlite.assembly.run import Run
from titanlite.ranks.agreement import all_ranks_arrive
from titanlite.runtime import logging
from titanlite.runtime.errors import UserError

pytestmark = pytest.mark.slow

TIME = "validation/time_s"


def two_sources(folder: Path) -> tuple[str, ...]:
    """Settings: a second training source, and log intervals in which starts may end."""
    np.save(folder / "second.npy", np.load(TOKENS)[4000:4500])
    return (
        *("metrics.log_freq=3", "data.sources.0.name=first", "data.sources.0.weight=2", "data.sources.1.weight=1"),
        *("data.sources.1.kind=tokens", f"data.sources.1.path={folder}/second.npy", "data.sources.1.name=second"),
    )


def with_validation(folder: Path) -> tuple[str, ...]:
    """Settings: validation on two sources after every third step."""
    np.save(folder / "held_out.npy", np.load(TOKENS)[5000:5333])
    np.save(folder / "other.npy", np.load(TOKENS)[7000:7020])
    tables = [
        f"validation.sources.{n}.{key}={value}"
        for n, name in enumerate(("held_out", "other"))
        for key, value in (("kind", "tokens"), ("path", folder / f"{name}.npy"), ("name", name))
    ]
    return ("validation.enable=true", "validation.interval=3", *tables)


def request_stop(run: Run, step: int) -> None:
    """Request a stop on the last rank while it validates on the second source after `step`."""
    assert run.validation is not None
    loader = run.validation.loaders["other"]
    next_step = loader.next_step

    def next_step_with_request() -> Any:
        if run.trainer.step == step and loader.stream_ids[0] == 1:
            run.stop.number = signal.SIGTERM
        return next_step()

    loader.next_step = next_step_with_request  # type: ignore[method-assign]


def fail(run: Run) -> None:
    """Raise an error on the last rank, as of a worker process that was killed, in the first validation."""
    assert run.validation is not None
    loader = run.validation.loaders["other"]
    if loader.stream_ids[0] == 1:
        loader.next_step = mock.Mock(side_effect=UserError("the worker process was killed"))  # type: ignore[method-assign]


def impatient() -> AbstractContextManager[Any]:
    """Log progress after each batch."""
    return mock.patch.object(logging, "PROGRESS_EVERY_S", 0.0)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != TIME} for row in numbers(folder)]


def test_validation_does_not_affect_training_and_is_logged_once_per_step(tmp_path: Path) -> None:
    off = two_sources(tmp_path)
    on = (*off, *with_validation(tmp_path))
    plain, uninterrupted, _, resumed, first, second, third, fourth, failed, after = start_runs(
        tmp_path,
        [
            Start(off, ranks=2, run="plain"),
            Start(on, ranks=2, run="uninterrupted"),
            Start(on, ranks=2, run="killed", kill=(4, 1)),
            Start(on, ranks=2, run="killed"),
            Start(on, ranks=2, run="stopped", spoil=partial(request_stop, step=3), around=impatient),
            Start(on, ranks=2, run="stopped", spoil=partial(request_stop, step=8)),
            Start(on, ranks=2, run="stopped"),
            Start(on, ranks=2, run="stopped"),
            Start(on, ranks=2, run="failed", spoil=fail),
            Start(on, ranks=2, run="failed"),
        ],
    )
    assert plain.end == uninterrupted.end == resumed.end == second.end == after.end
    assert (failed.error, after.step) == ("the worker process was killed", 3)
    assert resumed.step == 2
    for run in ("killed", "stopped"):
        for found, row in zip(rows_of(tmp_path / run), rows_of(tmp_path / "uninterrupted"), strict=True):
            assert found == pytest.approx(row, rel=1e-13)  # after a stop, sums are added in another order
    rows = rows_of(tmp_path / "uninterrupted")
    assert [row for row in rows if "loss" in row] == rows_of(tmp_path / "plain")
    assert all(
        {"loss/first", "loss/second", "share/first", "share/second"} < row.keys() for row in rows if "loss" in row
    )
    validated = [row for row in rows if "validation/loss" in row]
    assert [row["step"] for row in validated] == [3, 6, 8]
    assert [row["validation/num_valid"] for row in validated] == [332 + 19] * 3
    assert len({row["validation/loss/other"] for row in validated}) == 3
    cut = "after 0 s, without a result; the next start repeats it"
    assert first.logged(f"validation after step 3: cut by SIGTERM {cut}")
    assert second.logged(f"validation after step 8: cut by SIGTERM {cut}")
    assert not any(found.logged("cut by") for found in (uninterrupted, resumed, third, fourth))
    progress = [line.partition(": batch ")[0] for line in first.lines if ": batch " in line and "reading" not in line]
    # 332 tokens are 21 windows of two batches; the signal comes before the first batch of the other source
    assert progress == ["validation: source 1 of 2, held_out"] * 2
    assert has_stopped(first, 3)
    assert second.step == 3
    assert has_stopped(second, 8) == has_stopped(third, 8) is False  # the run is finished
    assert third.step == fourth.step == 8
    assert third.logged("validation after step 8")
    assert third.logged("Nothing to do")
    assert not fourth.logged("validation after step 8")


def arrivals() -> list[bool]:
    """Whether all ranks arrive if both do, if the first does, and if the last does."""
    group, last = dist.new_group(), dist.get_rank() == 1
    found = [all_ranks_arrive(group, 30.0)]
    for alone in (0, 1):
        found += [all_ranks_arrive(group, 0.2)] if last == alone else []
        dist.barrier()
    return found


def test_an_error_of_one_rank_does_not_wait_for_the_others() -> None:
    assert run_ranks(arrivals, 2) == [[True, False]] * 2


def has_stopped(outcome: Outcome, step: int) -> bool:
    return outcome.logged(f"Stopped by SIGTERM after step {step}, which is saved")
