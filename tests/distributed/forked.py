"""Ranks that may die: forked from a process that has imported everything, each seen to its end.

titanlite.runtime.launch ends all ranks when one fails; here the others are left alone, to see what they do.
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
"""After which a rank counts as hanging; its collectives wait for half as long."""


@dataclass(frozen=True)
class End:
    """How a rank ended. exit_code: as of a Popen; None: it had to be killed for hanging. error: (type, text)."""

    exit_code: int | None
    result: Any = None
    error: tuple[str, str] | None = None
    lines: list[str] = field(default_factory=list)
    """What it logged; nothing where it was killed."""

    @property
    def was_killed(self) -> bool:
        return self.exit_code == -signal.SIGKILL


class Parent:
    """A process with a single thread, from which ranks are forked: it has imported what they need, once for all."""

    def __init__(self) -> None:
        context = fork_context()
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,))
        self._process.start()
        other.close()

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """What `function(*args)` returns there, a JSON value. function: of a module; it may call fork_ranks."""
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
        except BrokenPipeError:  # the tests were ended
            return


def fork_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[End]:
    """Calls `function(*args)` on each rank, with a gloo process group; for a process with a single thread."""
    folder = Path(tempfile.mkdtemp())
    pids: dict[int, int] = {}
    codes: dict[int, int] = {}
    try:
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                try:
                    _be_rank(folder, rank, world_size, function, args)
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
    said = json.loads(answer.read_text()) if answer.exists() and code == 0 else {}
    error = said.get("error")
    return End(code, said.get("result"), tuple(error) if error else None, said.get("lines", []))


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def logged() -> list[str]:
    """What this rank has logged so far."""
    (handler,) = log.handlers
    assert isinstance(handler, _Lines)
    return handler.lines


def _be_rank(folder: Path, rank: int, world_size: int, function: Callable[..., Any], args: Sequence[Any]) -> None:
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
        dist.barrier()  # one that leaves early would break what another is still in
    except BaseException as error:
        answer["error"] = (type(error).__name__, f"{error}")
    answer["lines"] = lines.lines
    temporary = folder / f"{rank}.json.writing"
    temporary.write_text(json.dumps(answer))
    temporary.rename(folder / f"{rank}.json")
    os._exit(0)
