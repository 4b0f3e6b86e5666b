"""Worker processes, which get requests as JSON and answer with JSON and arrays. Nothing is pickled.

The standard input of a worker has lines of JSON: the arguments of its work, then any further requests. It exits when
its standard input is closed. The standard output has frames: a line of JSON, and the bytes of the arrays that it names.
A worker blocks when the pipe of its output is full.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, NoReturn

import numpy as np
import numpy.typing as npt

import titanlite
from titanlite.ranks.signals import STOP_SIGNALS
from titanlite.runtime.environment import safe_imports
from titanlite.runtime.errors import DataError, UserError
from titanlite.runtime.plugins import load_plugins, loaded_plugins

Arrays = Mapping[str, npt.NDArray[Any]]

logger = logging.getLogger("titanlite")


def worker_environment() -> dict[str, str]:
    """Variables of a worker: this installation of titanlite, nothing of the current folder, and one thread for the
    tokenizer."""
    paths = [str(Path(titanlite.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return safe_imports() | {"PYTHONPATH": os.pathsep.join(paths), "RAYON_NUM_THREADS": "1"}


class WorkerProcess:
    """A process `python -m module`, with this installation of titanlite and with the plugins of this process.

    Its tokenizer uses one thread, so that several processes do not compete for cores. remedy: what to do if the process
    ends, for messages.
    """

    def __init__(self, module: str, arguments: Mapping[str, Any], remedy: str) -> None:
        """arguments: of the function that the module passes to run_worker."""
        environment = os.environ | worker_environment()
        command = [sys.executable, "-P", "-m", module]
        self._remedy = remedy
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.send({"plugins": loaded_plugins(), "arguments": arguments})

    def send(self, request: Any) -> None:
        """Send a request, a JSON value."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # receive() reports the exit
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()

    def receive(self) -> tuple[Any, dict[str, npt.NDArray[Any]]]:
        """Wait for the next frame: its JSON value and its arrays. Logs what the worker has logged since the last frame.

        Raises the worker's UserError or DataError, and UserError if it has ended.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            self._raise_exit()
        head = json.loads(line)
        for level, message in head["log"]:
            logger.log(level, "%s", message)
        if "error" in head:
            sequence = head["sequence"]
            raise UserError(head["error"]) if sequence is None else DataError(head["error"], sequence)
        return head["value"], {name: self._read_array(*kind) for name, kind in head["arrays"].items()}

    def _read_array(self, dtype: str, shape: list[int]) -> npt.NDArray[Any]:
        array = np.empty(shape, dtype)
        assert self.process.stdout is not None
        if self.process.stdout.readinto(array.reshape(-1).view(np.uint8)) < array.nbytes:  # type: ignore[attr-defined]
            self._raise_exit()
        return array

    def _raise_exit(self) -> NoReturn:
        code = self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise UserError(
            f"the worker process {self.process.pid} {how}: it may have run out of memory, or its message is above; "
            f"{self._remedy}"
        )

    def close(self) -> None:
        """Kill the process: it has nothing to save. A thread that waits for its output wakes up."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


class _Collected(logging.Handler):
    """Collects log records, which are sent with the next frame."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage()))

    def drain(self) -> list[tuple[int, str]]:
        """Return the collected records and clear them."""
        lines, self.lines = self.lines, []
        return lines


def run_worker(work: Callable[..., Iterator[tuple[Any, Arrays]]]) -> None:
    """Run a worker process: send the frames that `work(requests, **arguments)` yields, until a pipe is closed.

    requests: an iterator over the values of WorkerProcess.send. A UserError of `work` is sent, and ends the process.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the parent may go on after a stop request; it kills its workers later
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep printed output out of the frames
    lines = SimpleQueue[bytes]()
    threading.Thread(target=_read_input, args=(lines,), daemon=True).start()
    requests = (json.loads(line) for line in iter(lines.get, None))
    first = next(requests)
    collected = _Collected()
    logger.addHandler(collected)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    with suppress(BrokenPipeError):
        try:
            load_plugins(first["plugins"])  # their kinds of sources
            for value, arrays in work(requests, **first["arguments"]):
                _send(output, {"log": collected.drain(), "value": value}, arrays)
        except UserError as error:
            sequence = error.sequence if isinstance(error, DataError) else None
            _send(output, {"log": collected.drain(), "error": str(error), "sequence": sequence}, {})


def _send(output: IO[bytes], head: dict[str, Any], arrays: Arrays) -> None:
    head["arrays"] = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
    output.write(json.dumps(head).encode() + b"\n")
    for array in arrays.values():
        output.write(array.data)
    output.flush()


def _read_input(lines: SimpleQueue[bytes]) -> None:
    """Put the lines of standard input into the queue; end the process when the input is closed."""
    # os.read instead of sys.stdin: the interpreter aborts at shutdown while a thread holds the lock of sys.stdin.
    rest = b""
    while data := os.read(0, 2**16):
        *complete, rest = (rest + data).split(b"\n")
        for line in complete:
            lines.put(line)
    os._exit(0)
