"""Prefetching of steps in a thread or in worker processes.

Each worker process (see data/processes.py) tokenizes and packs the sequences of some of its rank's streams, one frame
per step, one step ahead of the pipe.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Generic, TypeVar

import numpy as np
from pydantic import TypeAdapter

from titanlite.data.kinds import open_source
from titanlite.data.preparation import Assignment, Int64s, Preparation, PreparedStep, sequences_of
from titanlite.data.processes import Arrays, WorkerProcess, run_worker
from titanlite.data.sources.base import Source
from titanlite.data.sources.token_table import looks_in_use, use_looks
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import DataError

T = TypeVar("T")


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


class WorkerPool(Preparation):
    """A Preparation in up to data.num_workers processes, which start at the first step.

    Worker w of W prepares the sequences of every W-th stream, starting at the w-th.
    """

    def __init__(
        self, assignment: Assignment, sources: Sequence[Source], tokenizer: Tokenizer | None, streams: Sequence[int]
    ) -> None:
        super().__init__(assignment, sources, tokenizer, streams)
        self._numbers = list(streams)
        self._count = min(assignment.section.num_workers, len(self._numbers))
        self._workers: list[WorkerProcess] = []

    def load_state(self, states: Int64s, next_sequence: int, last_step: int) -> None:
        self.close()
        super().load_state(states, next_sequence, last_step)

    def step(self) -> PreparedStep:
        """The same as Preparation.step. Raises a worker's DataError or UserError, and UserError if a worker exited."""
        if not self._workers:
            self._workers = [self._start(slice(n, None, self._count)) for n in range(self._count)]
        sequences, _ = self.next_step()
        parts, errors = [], []
        for worker in self._workers:
            try:
                parts.append(PreparedStep(**worker.receive()[1]))
            except DataError as error:
                errors.append(error)
        if errors:  # report the bad row of the first sequence of the step
            raise min(errors, key=lambda error: error.sequence)
        return self._merged(parts, sequences)

    def _start(self, share: slice) -> WorkerProcess:
        """Start the worker of a share of the streams."""
        arguments = {
            "assignment": asdict(self._assignment),
            "content": self.content,
            "looks": looks_in_use(),
            "streams": self._numbers[share],
            "states": self.states()[share].tolist(),
            "next_sequence": self.next_sequence,
            "last_step": self.last_step,
        }
        remedy = "run the same command again to resume from the last checkpoint, or set data.num_workers = 0"
        return WorkerProcess("titanlite.data.workers", arguments, remedy)

    def _merged(self, parts: list[PreparedStep], sequences: range) -> PreparedStep:
        """Merge the workers' parts: rows in the order of the run, states in the order of the streams."""
        num_streams = self._assignment.section.num_streams
        worker_of = {stream: n % self._count for n, stream in enumerate(self._numbers)}
        rows = sequences_of(worker_of, num_streams, sequences)
        workers = np.array([worker_of[row % num_streams] for row in rows])
        of_states = np.arange(len(self._numbers)) % self._count

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


def prepared_steps(
    requests: Iterator[Any],  # noqa: ARG001
    *,
    assignment: dict[str, Any],
    content: dict[str, str],
    looks: list[list[Any]],
    streams: list[int],
    states: list[list[int]],
    next_sequence: int,
    last_step: int,
) -> Iterator[tuple[None, Arrays]]:
    """The steps of some streams, without end, in a worker process. content, looks: of the parent's Preparation and
    sources."""
    use_looks(looks)
    settings = TypeAdapter(Assignment).validate_python(assignment)
    tokenizer = Tokenizer(**settings.tokenizer) if settings.tokenizer else None
    opened = [open_source(source) for source in settings.section.sources]
    preparation = Preparation(settings, opened, tokenizer, streams, content)
    preparation.load_state(np.array(states, np.int64), next_sequence, last_step)
    while True:
        step = preparation.step()._asdict()
        yield None, {field: array for field, array in step.items() if array is not None}


if __name__ == "__main__":
    run_worker(prepared_steps)
