"""Rank processes that are reused by many cases: no state of one case reaches the next."""

import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests import pool
from tests.distributed.layouts import BOUNDS, Layout, measure
from tests.distributed.mistakes import averaging_reduction, changed
from tests.pool import run_ranks
from titanlite.ranks import launch
from titanlite.ranks.launch import RankError
from titanlite.runtime.logging import log
from titanlite.trainer import Trainer

REPLICATE = Layout((1, 2, 1, 1), accumulation=2)


def pids() -> list[int | None]:
    run_ranks(dist.get_rank, 2)
    return pool._pools[2].pids


def process_state() -> dict[str, Any]:
    """State of the process that a case can observe."""
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    return {
        "sum over ranks": int(total),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "arguments": sys.argv,
        "python draws": random.random(),
        "draws": [float(np.random.rand()), float(torch.rand(()))],
        "deterministic": [torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic],
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "interrupt": str(signal.getsignal(signal.SIGINT)),
        "log": [log.level, log.propagate, len(log.handlers), len(log.filters)],
    }


def change_everything(folder: str) -> None:
    dist.new_group()
    os.environ["PLANTED"] = "1"
    del os.environ["PATH"]
    os.chdir(folder)
    sys.argv.append("planted")
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log.addHandler(logging.NullHandler())
    log.addFilter(lambda record: False)  # noqa: ARG005
    log.propagate = not log.propagate
    log.setLevel(logging.ERROR)


@pytest.mark.slow
def test_each_case_starts_with_the_initial_process_state(tmp_path: Path) -> None:
    processes, before = pids(), run_ranks(process_state, 2)
    run_ranks(change_everything, 2, str(tmp_path))
    assert run_ranks(process_state, 2) == before
    assert pids() == processes
    new = launch.run_ranks(process_state, 2)
    for rank in (*before, *new):
        del rank["python draws"]  # seeded again in each forked process
    assert before == new


def gradient_error(plant: str) -> float:
    """Gradient error of a step of two replicas. plant: "mutate" breaks the trainer, "leave" its class."""
    if plant == "leave":
        replace_code()
    with changed(averaging_reduction)() if plant == "mutate" else nullcontext():
        return measure(REPLICATE).gradient


@pytest.mark.slow
def test_a_planted_bug_does_not_reach_the_next_case() -> None:
    """Neither a change of the trainer nor code that a case replaced and did not restore."""
    for plant in ("mutate", "leave"):
        assert min(run_ranks(gradient_error, 2, plant)) > 1e-3
        assert max(run_ranks(gradient_error, 2, "")) <= BOUNDS["float64"]


def replace_code() -> None:
    Trainer.count_valid_tokens = lambda self, batches: torch.tensor(7)  # type: ignore[method-assign] # noqa: ARG005


def leave_threads() -> None:
    for _ in range(30):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


@pytest.mark.slow
@pytest.mark.parametrize("case", [replace_code, leave_threads])
def test_case_that_leaves_replaced_code_or_threads_ends_the_pool(case: Callable[[], None]) -> None:
    before = pids()
    run_ranks(case, 2)
    assert not set(pids()) & set(before)


def fail(how: str) -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("planted")
        if how == "exit":
            os._exit(3)
        time.sleep(100)
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "^rank 1 failed:\n(.*\n)*ValueError: planted"),
        ("exit", "^rank 1 ended with exit code 3"),
        ("hang", r"^(ranks \[0, 1\] are still running|rank 0 failed)"),
    ],
)
def test_case_that_fails_or_hangs_ends_the_pool(how: str, message: str) -> None:
    before = pids()
    with pytest.raises(RankError, match=message):
        run_ranks(fail, 2, how, timeout_s=2.0 if how == "hang" else 60.0)
    for pid in before:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not set(pids()) & set(before)
