"""Compute time: how long a rank works by itself in a step."""

from time import perf_counter, thread_time


class ComputeTime:
    """Seconds of a step in which this rank does not wait for others. For one thread.

    From `start` to the first collective of the step, wall time: preparing the step, data included. From there to `stop`
    CPU time of the calling thread, since a thread that waits for other ranks uses none. Not seen: work of a GPU, and
    what blocks without CPU time after the first collective, such as a sleep.
    """

    def __init__(self) -> None:
        self._began = perf_counter()
        self._alone_s = 0.0
        self._cpu_began = thread_time()

    def start(self) -> None:
        self._began = perf_counter()

    def before_collectives(self) -> None:
        """To be called right before the first collective of the step."""
        self._alone_s = perf_counter() - self._began
        self._cpu_began = thread_time()

    def stop(self) -> float:
        return self._alone_s + thread_time() - self._cpu_began
