"""Ranks that may crash, forked from a process that has imported all modules.

titanlite.runtime.launch stops all ranks if one fails. Here the other ranks keep running, so tests can observe them.
"""

import json
import logging
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.runtime.launch import fork_context
from titanlite.runtime.logging import log

PATIENCE_S = 120.0
"""Seconds after which a rank counts as hanging; collectives time out after half of it."""


@dataclass(frozen=True)
class End:
    """End of a rank. exit_code: as in subprocess.Popen; None if the rank hung and was killed. error: (type, text)."""

    exit_code: int | None
    result: Any = None
    error: tuple[str, str] | None = None
    lines: list[str] = field(default_factory=list)
    """Log lines; empty if the rank was killed."""

    @property
    def was_killed(self) -> bool:
        return self.exit_code == -signal.SIGKILL


class Parent:
    """A single-threaded process that forks ranks; it imports the modules for all of them once."""

    def __init__(self) -> None:
        context = fork_context()
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,))
        self._process.start()
        other.close()

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(*args)` in the process and return its JSON result. The function may call fork_ranks."""
        self._connection.send((function, args))
        try:
            answer = json.loads(self._connection.recv_bytes())
        except EOFError:
            self._process.join()
            raise AssertionError(f"the process ended with exit code {self._process.exitcode}") from None
        if "error" in answer:
            raise AssertionError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(connection: Connection) -> None:
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            answer = {"result": function(*args)}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        try:
            connection.send_bytes(json.dumps(answer).encode())
        except BrokenPipeError:  # pytest has exited
            return


def fork_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[End]:
    """Call `function(*args)` on each rank with a gloo process group. Requires a single-threaded process."""
    folder = Path(tempfile.mkdtemp())
    pids: dict[int, int] = {}
    codes: dict[int, int] = {}
    try:
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                try:
                    _run_rank(folder, rank, world_size, function, args)
                finally:
                    os._exit(1)
            pids[rank] = pid
        deadline = time.monotonic() + PATIENCE_S
        while len(codes) < world_size and time.monotonic() < deadline:
            for rank in pids.keys() - codes.keys():
                ended, status = os.waitpid(pids[rank], os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        return [_end(folder / f"{rank}.json", codes.get(rank)) for rank in range(world_size)]
    finally:
        for rank in pids.keys() - codes.keys():
            os.kill(pids[rank], signal.SIGKILL)
            os.waitpid(pids[rank], 0)
        shutil.rmtree(folder)


def _end(answer: Path, code: int | None) -> End:
    content = json.loads(answer.read_text()) if answer.exists() and code == 0 else {}
    error = content.get("error")
    return End(code, content.get("result"), tuple(error) if error else None, content.get("lines", []))


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
    lines = _Lines()
    log.handlers[:] = [lines]
    log.setLevel(logging.INFO)
    log.propagate = False
    answer: dict[str, Any] = {}
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), world_size)
        timeout = timedelta(seconds=PATIENCE_S / 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        answer["result"] = function(*args)
        dist.barrier()  # a rank that exits early would break a collective of another rank
    except BaseException as error:
        answer["error"] = (type(error).__name__, f"{error}")
    answer["lines"] = lines.lines
    temporary = folder / f"{rank}.json.writing"
    temporary.write_text(json.dumps(answer))
    temporary.rename(folder / f"{rank}.json")
    os._exit(0)
