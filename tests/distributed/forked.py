"""Ranks that may crash, forked from the fork server.

titanlite.ranks.launch stops all ranks if one fails. Here the other ranks keep running, so tests can observe them.
"""

import logging
import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from titanlite.ranks.launch import fork_context
from titanlite.runtime.logging import log

PATIENCE_S = 120.0
"""Seconds after which a rank counts as hanging; collectives time out after half of it."""


@dataclass(frozen=True)
class End:
    """End of a rank. exit_code: as in subprocess.Popen; None if the rank hung and was killed. error: (type, text)."""

    exit_code: int | None
    result: Any = None
    error: tuple[str, str] | None = None

    @property
    def was_killed(self) -> bool:
        return self.exit_code == -signal.SIGKILL


def fork_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[End]:
    """Call `function(*args)` on each rank with a gloo process group."""
    with TemporaryDirectory() as folder:
        processes = [
            fork_context().Process(target=_run_rank, args=(Path(folder), rank, world_size, function, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + PATIENCE_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        return [_end(Path(folder, f"{rank}"), code) for rank, code in enumerate(codes)]


def on_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Results of `function(*args)` by rank; fails if a rank fails."""
    return results(fork_ranks(function, world_size, *args))


def results(ends: list[End]) -> list[Any]:
    """Results by rank; fails if a rank has failed."""
    for end in ends:
        assert end.exit_code == 0 and end.error is None, end  # noqa: PT018 shows all of `end`
    return [end.result for end in ends]


def _end(answer: Path, code: int | None) -> End:
    return End(code, *pickle.loads(answer.read_bytes())) if code == 0 else End(code)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def logged() -> list[str]:
    """Log lines of this rank so far."""
    (handler,) = log.handlers
    assert isinstance(handler, _Lines)
    return handler.lines


def _run_rank(folder: Path, rank: int, world_size: int, function: Callable[..., Any], args: Sequence[Any]) -> None:
    log.handlers[:] = [_Lines()]
    log.setLevel(logging.INFO)
    log.propagate = False
    result, error = None, None
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), world_size)
        timeout = timedelta(seconds=PATIENCE_S / 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        result = function(*args)
        dist.barrier()  # a rank that exits early would break a collective of another rank
    except BaseException as failure:
        error = (type(failure).__name__, f"{failure}")
    (folder / f"{rank}").write_bytes(pickle.dumps((result, error)))
    os._exit(0)
