"""Parts of the time of a step: named regions, as they appear in a trace, and the time without waits for other ranks."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from time import perf_counter, thread_time
from typing import Literal, ParamSpec, TypeVar, get_args

from torch.profiler import record_function

from titanlite.runtime.torch_internals import is_profiling

Region = Literal["data", "forward", "backward", "reduce", "clip", "update"]
REGIONS: tuple[Region, ...] = get_args(Region)

P = ParamSpec("P")
T = TypeVar("T")

_NO_REGION = nullcontext()


def region(name: Region) -> AbstractContextManager[object]:
    """Context manager that names its part of the step in a trace; regions do not overlap.

    data: waiting for the batches of the step, and their copies to the device. forward, backward: of a microbatch, with
    the collectives inside: FSDP gathers parameters in both, and reduces gradients in backward, as `replicate` does;
    tensor parallelism communicates in both. reduce: the all-reduce of the number of valid tokens; in a pipeline, also
    the reduction of gradients after the last microbatch. clip: the norm of all gradients, with its all-reduces, and
    clipping. update: the optimizer. Between the regions of a pipeline, its stages wait for each other.

    Without an active profiler it costs a tenth of a microsecond: `record_function` alone would cost 10 to 20.
    """
    return record_function(name) if is_profiling() else _NO_REGION


def in_region(name: Region, function: Callable[P, T]) -> Callable[P, T]:
    """The function, with its calls named in a trace."""

    @wraps(function)
    def named(*args: P.args, **kwargs: P.kwargs) -> T:
        with region(name):
            return function(*args, **kwargs)

    return named


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
