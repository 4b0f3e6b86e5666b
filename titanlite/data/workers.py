"""Prefetching of steps in a thread or in worker processes.

Each worker process tokenizes and packs the sequences of some of its rank's streams. WorkerPool starts it as
`python -m titanlite.data.workers`. Standard input is one line of JSON, the request. Standard output is one frame per
step: a line of JSON and the bytes of the arrays. A worker blocks when the pipe is full, one step ahead of the pipe. It
exits when its standard input is closed.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Generic, NoReturn, TypeVar

import numpy as np

import titanlite
from titanlite.data.kinds import open_source
from titanlite.data.preparation import Assignment, Int64s, Preparation, PreparedStep, content_keys, sequences_of
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import DataError, UserError
from titanlite.runtime.plugins import load_plugins, loaded_plugins
from titanlite.runtime.signal_thread import STOP_SIGNALS

T = TypeVar("T")

logger = logging.getLogger("titanlite")


class _Shared(Generic[T]):
    """State shared by the thread and its consumer. The thread has no reference to the consumer, so the consumer can be
    garbage-collected."""

    def __init__(self, produce: Callable[[], T], depth: int) -> None:
        self.produce = produce
        self.depth = depth
        self.items: deque[T] = deque()
        self.error: BaseException | None = None
        self.stopping = False
        self.changed = threading.Condition()

    def run(self) -> None:
        """Run in the thread: produce items until `stopping` is set or `produce` raises. The error follows the items."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.stopping or len(self.items) < self.depth)
                if self.stopping:
                    return
            try:
                item = self.produce()
            except BaseException as error:  # get() raises it; SystemExit would end the main thread without a message
                is_usual = isinstance(error, Exception)
                with self.changed:
                    self.error = error if is_usual else RuntimeError(f"the data thread ended by {error!r}")
                    self.changed.notify_all()
                return
            with self.changed:
                self.items.append(item)
                self.changed.notify_all()


EXIT_TIMEOUT_S = 5.0
"""Maximum wait for the thread at exit, for example if a file system hangs."""


def _stop(shared: _Shared[T], thread: threading.Thread, timeout_s: float | None) -> None:
    with shared.changed:
        shared.stopping = True
        shared.changed.notify_all()
    if thread is not threading.current_thread():
        thread.join(timeout_s)


class Prefetcher(Generic[T]):
    """Calls `produce()` repeatedly in a thread, at most `depth` results ahead.

    If `produce` raises, the `get` that would have returned this result raises the exception, as do all later ones. The
    thread ends on close(), on garbage collection of this object, and before the interpreter shuts down (a thread inside
    a native library would crash the process then).
    """

    def __init__(self, produce: Callable[[], T], depth: int) -> None:
        self._shared = _Shared(produce, depth)
        thread = threading.Thread(target=self._shared.run, name="titanlite-data", daemon=True)
        thread.start()
        self._thread = thread
        self._finalizer = weakref.finalize(self, _stop, self._shared, thread, EXIT_TIMEOUT_S)

    def get(self) -> T:
        """Wait for the next result and return it. Raises the exception of `produce`."""
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(lambda: shared.items or shared.error is not None or shared.stopping)
            if shared.items:
                item = shared.items.popleft()
                shared.changed.notify_all()
                return item
            if shared.error is not None:
                raise shared.error
        raise RuntimeError("the prefetcher is closed")

    def close(self, timeout_s: float | None = EXIT_TIMEOUT_S) -> None:
        """Stop the thread after its current call of `produce`. timeout_s None: no timeout. May be called twice."""
        self._finalizer.detach()
        _stop(self._shared, self._thread, timeout_s)


def start_process(module: str, *arguments: str, **settings: Any) -> subprocess.Popen[bytes]:
    """Start `python -m module arguments` with this installation of titanlite. settings: arguments of Popen.

    The tokenizer of the process uses one thread, so that several processes do not compete for cores.
    """
    paths = [str(Path(titanlite.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "RAYON_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", module, *arguments], env=environment, **settings)


def describe_exit(code: int) -> str:
    """Describe an exit code: the signal that killed the process, or the code."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class WorkerPool:
    """The same as a Preparation of `streams`, in up to data.num_workers processes, which start at the first step.

    Worker w of W has every W-th stream, starting at the w-th. content: content_keys of what they must read. states: the
    initial states of all these streams.
    """

    def __init__(self, assignment: Assignment, content: dict[str, str], streams: Sequence[int], states: Int64s) -> None:
        self._assignment = assignment
        self._content = content
        self._streams = list(streams)
        self._count = min(assignment.section.num_workers, len(self._streams))
        self._workers: list[_Worker] = []
        self.load_state(states, 0)

    def load_state(self, states: Int64s, next_sequence: int) -> None:
        """Continue at sequence `next_sequence` of the run. states: (streams, values)."""
        self.close()
        self._states = states
        self.next_sequence = next_sequence

    def step(self) -> PreparedStep:
        """The same as Preparation.step. Raises a worker's DataError or UserError, and UserError if a worker exited."""
        if not self._workers:
            self._start()
        first = self.next_sequence
        self.next_sequence = first + self._assignment.global_batch_size
        parts, errors = [], []
        for worker in self._workers:
            try:
                parts.append(worker.step())
            except DataError as error:
                errors.append(error)
        if errors:  # report the bad row of the first sequence of the step
            raise min(errors, key=lambda error: error.sequence)
        return self._merged(parts, range(first, self.next_sequence))

    def _start(self) -> None:
        self._workers = [_Worker() for _ in range(self._count)]
        for n, worker in enumerate(self._workers):
            share = slice(n, None, self._count)
            worker.begin(self._assignment, self._content, self._streams[share], self._states[share], self.next_sequence)

    def _merged(self, parts: list[PreparedStep], sequences: range) -> PreparedStep:
        """Merge the workers' parts: rows in the order of the run, states in the order of the streams."""
        num_streams = self._assignment.section.num_streams
        worker_of = {stream: n % self._count for n, stream in enumerate(self._streams)}
        rows = sequences_of(worker_of, num_streams, sequences)
        workers = np.array([worker_of[row % num_streams] for row in rows])
        of_states = np.arange(len(self._streams)) % self._count

        def merge(field: str, owners: Int64s) -> Int64s:
            arrays = [getattr(part, field) for part in parts]
            merged = np.empty((len(owners), arrays[0].shape[1]), np.int64)
            for n, array in enumerate(arrays):
                merged[owners == n] = array
            return merged

        return PreparedStep(
            merge("tokens", workers),
            merge("labels", workers),
            merge("lengths", workers),
            merge("origins", workers),
            merge("states", of_states),
            np.min([part.ended for part in parts], axis=0),
            merge("positions", workers) if self._assignment.section.masks_documents else None,
        )

    def close(self) -> None:
        """Stop the processes. May be called twice."""
        for worker in self._workers:
            worker.close()
        self._workers = []


class _Worker:
    """A worker process, as seen by the loader."""

    def __init__(self) -> None:
        self._process = start_process("titanlite.data.workers", stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def begin(
        self,
        assignment: Assignment,
        content: dict[str, str],
        streams: Sequence[int],
        states: Int64s,
        next_sequence: int,
    ) -> None:
        """Send the request to the process."""
        request = {"assignment": asdict(assignment), "content": content, "streams": streams, "states": states.tolist()}
        request["plugins"] = loaded_plugins()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # step() reports the exit
            self._process.stdin.write(json.dumps(request | {"next_sequence": next_sequence}).encode() + b"\n")
            self._process.stdin.flush()

    def step(self) -> PreparedStep:
        """Wait for this worker's part of the next step, and return it. Raises the worker's error, and UserError if the
        worker exited."""
        head = json.loads(self._read_line())
        for level, message in head["log"]:
            logger.log(level, "%s", message)
        if "error" in head:
            sequence = head["sequence"]
            raise UserError(head["error"]) if sequence is None else DataError(head["error"], sequence)
        return PreparedStep(**{field: self._read_array(shape) for field, shape in head["shapes"].items()})

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        line: bytes = self._process.stdout.readline()
        return line if line.endswith(b"\n") else self._raise_exit()

    def _read_array(self, shape: list[int]) -> Int64s:
        assert self._process.stdout is not None
        array = np.empty(shape, np.int64)
        if self._process.stdout.readinto(array.reshape(-1).view(np.uint8)) < array.nbytes:  # type: ignore[attr-defined]
            self._raise_exit()
        return array

    def _raise_exit(self) -> NoReturn:
        how = describe_exit(self._process.wait())
        raise UserError(
            f"a data worker (process {self._process.pid}) {how}: it may have run out of memory, or its message is "
            "above; run the same command again to resume from the last checkpoint, or set data.num_workers = 0"
        )

    def close(self) -> None:
        """Kill the process: it has nothing to save. A thread that waits for its output wakes up."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


class _Collected(logging.Handler):
    """Collects the log records of a step, which are sent to the loader."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage()))

    def drain(self) -> list[tuple[int, str]]:
        """Return the collected records and clear them."""
        lines, self.lines = self.lines, []
        return lines


def main() -> None:
    """Prepare steps until standard output or standard input is closed."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the rank may train on after a stop request; it kills its workers later
    frames = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep printed output out of the frames
    request = json.loads(sys.stdin.buffer.readline() or "null")
    if request is None:
        return
    threading.Thread(target=_exit_with_input, daemon=True).start()
    collected = _Collected()
    logger.addHandler(collected)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    with suppress(BrokenPipeError):
        try:
            load_plugins(request["plugins"])  # their kinds of sources
            assignment = Assignment.from_json(request["assignment"])
            tokenizer = Tokenizer(**assignment.tokenizer) if assignment.tokenizer else None
            opened = [open_source(source) for source in assignment.section.sources]
            found = content_keys(opened, tokenizer)
            if changed := [key for key, value in request["content"].items() if found[key] != value]:
                raise UserError(
                    f"{', '.join(changed)}: files were added, removed or written while the run was starting; start "
                    "again when they are complete"
                )
            preparation = Preparation(assignment, opened, tokenizer, request["streams"])
            preparation.load_state(np.array(request["states"], np.int64), request["next_sequence"])
            while True:
                _send(frames, preparation.step(), collected)
        except UserError as error:
            sequence = error.sequence if isinstance(error, DataError) else None
            head = {"log": collected.drain(), "error": str(error), "sequence": sequence}
            frames.write(json.dumps(head).encode() + b"\n")
        frames.flush()


def _send(frames: IO[bytes], step: PreparedStep, collected: _Collected) -> None:
    arrays = {field: array for field, array in step._asdict().items() if array is not None}
    shapes = {field: array.shape for field, array in arrays.items()}
    frames.write(json.dumps({"log": collected.drain(), "shapes": shapes}).encode() + b"\n")
    for array in arrays.values():
        frames.write(array.data)
    frames.flush()


def _exit_with_input() -> None:
    # os.read instead of sys.stdin: the interpreter aborts at shutdown while a thread holds the lock of sys.stdin.
    while os.read(0, 2**16):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
