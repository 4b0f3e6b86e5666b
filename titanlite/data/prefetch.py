"""Preparing items ahead in a background thread."""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


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
