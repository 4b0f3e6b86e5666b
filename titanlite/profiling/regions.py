"""Named regions of a step, as they appear in a trace."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
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
