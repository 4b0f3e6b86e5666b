"""Preparing steps ahead of a loader, in a thread or in processes: each of these tokenizes and packs the sequences of
some of its rank's streams.

`python -m titanlite.data.workers` is started by WorkerPool alone. Down its standard input comes one line of JSON that
says what to prepare; up its standard output comes a frame for each step: a line of JSON and the arrays' bytes. A worker
is a step ahead of what the pipe holds, for then it waits there. It ends when its standard input does.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Generic, NoReturn, TypeVar

import numpy as np

import titanlite
from titanlite.data.config import DataConfig
from titanlite.data.kinds import open_source
from titanlite.data.preparation import Int64s, Preparation, PreparedStep, Sources, sequences_of
from titanlite.data.sources.config import SourceConfig
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import DataError, UserError

T = TypeVar("T")

logger = logging.getLogger("titanlite")


class _Shared(Generic[T]):
    """What the thread and its consumer share; the thread knows nothing else, so that the consumer can be collected."""

    def __init__(self, produce: Callable[[], T], depth: int) -> None:
        self.produce = produce
        self.depth = depth
        self.items: deque[T] = deque()
        self.error: BaseException | None = None
        self.stopping = False
        self.changed = threading.Condition()

    def run(self) -> None:
        """The thread: produce until told to stop or until `produce` raises; the error queues behind the items."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.stopping or len(self.items) < self.depth)
                if self.stopping:
                    return
            try:
                item = self.produce()
            except BaseException as error:  # raised again by the consumer
                with self.changed:
                    self.error = error
                    self.changed.notify_all()
                return
            with self.changed:
                self.items.append(item)
                self.changed.notify_all()


EXIT_TIMEOUT_S = 5.0
"""So long the process waits for a result that does not come (a file system that hangs) before it ends without it."""


def _stop(shared: _Shared[T], thread: threading.Thread, timeout_s: float | None) -> None:
    with shared.changed:
        shared.stopping = True
        shared.changed.notify_all()
    if thread is not threading.current_thread():
        thread.join(timeout_s)


class Prefetcher(Generic[T]):
    """The results of `produce()`, called again and again in a thread, at most `depth` of them ahead.

    An exception of `produce` is raised by the `get` that would have returned its result, and by all later ones. The
    thread ends with close(), with the last reference to this object, and before the interpreter shuts down (a thread
    that is inside a native library then would take the process with it).
    """

    def __init__(self, produce: Callable[[], T], depth: int) -> None:
        self._shared = _Shared(produce, depth)
        thread = threading.Thread(target=self._shared.run, name="titanlite-data", daemon=True)
        thread.start()
        self._thread = thread
        self._finalizer = weakref.finalize(self, _stop, self._shared, thread, EXIT_TIMEOUT_S)

    def get(self) -> T:
        """The next result; waits for it. Raises what `produce` raised."""
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
        """End the thread once the result that it is at is done; None: however long that takes. May be called twice."""
        self._finalizer.detach()
        _stop(self._shared, self._thread, timeout_s)


def start_process(module: str, *arguments: str, **settings: Any) -> subprocess.Popen[bytes]:
    """`python -m module arguments` with this very titanlite. settings: of Popen.

    One core each: several threads for each of several processes would only compete.
    """
    paths = [str(Path(titanlite.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "RAYON_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", module, *arguments], env=environment, **settings)


def describe_exit(code: int) -> str:
    """What an exit code says: killed by which signal, or ended by itself."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


@dataclass(frozen=True)
class Assignment:
    """What the streams of a rank are made of. section: resolved (no -1). logs: as of Sources."""

    section: DataConfig
    tokenizer: dict[str, str] | None
    seq_len: int
    vocab_size: int
    global_batch_size: int
    logs: bool = True

    def preparation(self, sources: Sources, streams: Sequence[int]) -> Preparation:
        """Of these streams."""
        return Preparation(
            sources,
            streams,
            num_streams=self.section.num_streams,
            seq_len=self.seq_len,
            global_batch_size=self.global_batch_size,
            with_positions=self.section.document_mask,
        )

    def open(self) -> Sources:
        """The sources, and the tokenizer with them."""
        tokenizer = None
        if self.tokenizer is not None:
            named = self.tokenizer
            tokenizer = Tokenizer(Path(named["file"]), bos=named["bos"], eos=named["eos"])
        return self.sources(tokenizer)

    def sources(self, tokenizer: Tokenizer | None) -> Sources:
        """Opened in this process."""
        opened = [open_source(source) for source in self.section.sources]
        return Sources(
            self.section, opened, tokenizer, seq_len=self.seq_len, vocab_size=self.vocab_size, logs=self.logs
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> "Assignment":
        section = values["section"]
        sources = tuple(SourceConfig(**source) for source in section["sources"])
        return Assignment(**values | {"section": DataConfig(**section | {"sources": sources})})


class WorkerPool:
    """As a Preparation of `streams`, by up to `count` processes; they start with the first step.

    Worker w of W has every W-th stream from the w-th on. states: of all these streams at the beginning.
    """

    def __init__(self, assignment: Assignment, streams: Sequence[int], count: int, states: Int64s) -> None:
        self._assignment = assignment
        self._streams = list(streams)
        self._count = min(count, len(self._streams))
        self._workers: list[_Worker] = []
        self.load_state(states, 0)

    def load_state(self, states: Int64s, next_sequence: int) -> None:
        """Continue with that sequence of the run. states: (streams, values)."""
        self.close()
        self._states = states
        self.next_sequence = next_sequence

    def step(self) -> PreparedStep:
        """As Preparation.step; raises what a worker has raised, and UserError where one is gone."""
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
        if errors:  # of the bad rows of a step the first one in the run's order speaks
            raise min(errors, key=lambda error: error.sequence)
        return self._joined(parts, range(first, self.next_sequence))

    def _start(self) -> None:
        self._workers = [_Worker() for _ in range(self._count)]
        for n, worker in enumerate(self._workers):
            share = slice(n, None, self._count)
            worker.begin(self._assignment, self._streams[share], self._states[share], self.next_sequence)

    def _joined(self, parts: list[PreparedStep], sequences: range) -> PreparedStep:
        """The rows in the order of the run, the states in that of the streams."""
        num_streams = self._assignment.section.num_streams
        worker_of = {stream: n % self._count for n, stream in enumerate(self._streams)}
        rows = sequences_of(worker_of, num_streams, sequences)
        workers = np.array([worker_of[row % num_streams] for row in rows])
        of_states = np.arange(len(self._streams)) % self._count

        def joined(field: str, owners: Int64s) -> Int64s:
            arrays = [getattr(part, field) for part in parts]
            whole = np.empty((len(owners), arrays[0].shape[1]), np.int64)
            for n, array in enumerate(arrays):
                whole[owners == n] = array
            return whole

        return PreparedStep(
            joined("tokens", workers),
            joined("labels", workers),
            joined("origins", workers),
            joined("states", of_states),
            np.min([part.ended for part in parts], axis=0),
            joined("positions", workers) if self._assignment.section.document_mask else None,
        )

    def close(self) -> None:
        """End the processes. May be called twice."""
        for worker in self._workers:
            worker.close()
        self._workers = []


class _Worker:
    """The loader's end of one process."""

    def __init__(self) -> None:
        self._process = start_process("titanlite.data.workers", stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def begin(self, assignment: Assignment, streams: Sequence[int], states: Int64s, next_sequence: int) -> None:
        """Tells it what to prepare."""
        words = {"assignment": assignment.to_json(), "streams": streams, "states": states.tolist()}
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # step() finds out why
            self._process.stdin.write(json.dumps(words | {"next_sequence": next_sequence}).encode() + b"\n")
            self._process.stdin.flush()

    def step(self) -> PreparedStep:
        """Its part of the next step; waits for it. Raises what it has raised, UserError where it is gone."""
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
        return line if line.endswith(b"\n") else self._is_gone()

    def _read_array(self, shape: list[int]) -> Int64s:
        assert self._process.stdout is not None
        array = np.empty(shape, np.int64)
        if self._process.stdout.readinto(array.reshape(-1).view(np.uint8)) < array.nbytes:  # type: ignore[attr-defined]
            self._is_gone()
        return array

    def _is_gone(self) -> NoReturn:
        how = describe_exit(self._process.wait())
        raise UserError(
            f"a data worker (process {self._process.pid}) {how}: it may have run out of memory, or its own message is "
            "above; the same command goes on from the last checkpoint, and data.num_workers = 0 does without workers"
        )

    def close(self) -> None:
        """End it at once: it has nothing to save. Wakes a thread that waits for it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


class _Collected(logging.Handler):
    """What the worker's part of the next step has to say."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage()))

    def taken(self) -> list[tuple[int, str]]:
        """All that is new."""
        lines, self.lines = self.lines, []
        return lines


def main() -> None:
    """Prepare steps until nobody reads them any more."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a rank that is asked to stop may still train, and then ends its workers
    frames = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed here is no frame
    words = json.loads(sys.stdin.buffer.readline() or "null")
    if words is None:
        return
    threading.Thread(target=_end_with_input, daemon=True).start()
    collected = _Collected()
    logger.addHandler(collected)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    with suppress(BrokenPipeError):
        try:
            assignment = Assignment.from_json(words["assignment"])
            preparation = assignment.preparation(assignment.open(), words["streams"])
            preparation.load_state(np.array(words["states"], np.int64), words["next_sequence"])
            while True:
                _send(frames, preparation.step(), collected)
        except UserError as error:
            sequence = error.sequence if isinstance(error, DataError) else None
            head = {"log": collected.taken(), "error": str(error), "sequence": sequence}
            frames.write(json.dumps(head).encode() + b"\n")
        frames.flush()


def _send(frames: IO[bytes], step: PreparedStep, collected: _Collected) -> None:
    arrays = {field: array for field, array in step._asdict().items() if array is not None}
    shapes = {field: array.shape for field, array in arrays.items()}
    frames.write(json.dumps({"log": collected.taken(), "shapes": shapes}).encode() + b"\n")
    for array in arrays.values():
        frames.write(array.data)
    frames.flush()


def _end_with_input() -> None:
    # Not through sys.stdin: the interpreter cannot shut down, and aborts, while a thread waits with its lock.
    while os.read(0, 2**16):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
