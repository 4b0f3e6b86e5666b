"""Where the time of profiled steps goes: by region, by cause and by operation."""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from titanlite.profiling.regions import REGIONS

CAUSES = {
    "matrix products": r"aten::(add|b|badd)?mm_?$|mkldnn::_linear",
    "attention": r"aten::_(scaled_dot_product|flash_attention|efficient_attention|cudnn_attention)",
    "optimizer": r"aten::_fused_adamw",
    "communication": r"c10d|_c10d_functional|fsdp::|record_param_comms",
    "compiled code": r"## Call CompiledFxGraph|triton_|cpp_fused|CompiledFunction|Torch-Compiled Region",
    "rest": r"(?!aten::)|aten::(new_)?empty|aten::(_?unsafe_)?(view|reshape|split|chunk|select|slice|narrow)"
    r"|aten::(t|transpose|as_strided|expand|permute|detach|alias|unbind|flatten|(un)?squeeze|linear|matmul)$",
    "copies": r"aten::(.*copy|clone|cat|stack|contiguous|to|_to|zeros?|fill|index|gather|scatter|embedding)",
    "reductions": r"aten::(sum|mean|amax|max|all|any|.*norm)",
    "pointwise": r"aten::",
}
"""Cause -> pattern of the operations; the first one that matches counts."""


class Operation(NamedTuple):
    """All calls of an operation. time_s: without the operations that it calls."""

    name: str
    time_s: float
    calls: int


def host_events(events: Iterable[FunctionEvent]) -> list[FunctionEvent]:
    """The events of host threads, which also have the time of the kernels that they launched."""
    return [event for event in events if event.device_type == DeviceType.CPU and not event.is_async]


def self_time_s(event: FunctionEvent, *, on_device: bool) -> float:
    """Seconds of an operation without those that it calls: of its kernels, or on the host."""
    return float(event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e6


@cache
def cause_of(name: str) -> str:
    """The key of CAUSES for the name of an operation."""
    return next(cause for cause, pattern in CAUSES.items() if re.match(pattern, name))


def time_by_cause(
    events: Sequence[FunctionEvent], elapsed_s: float, waited_s: float, *, on_device: bool = False
) -> dict[str, float]:
    """Seconds of each cause, of `elapsed_s` of a rank.

    events: from host_events. waited_s: seconds in which the host thread did not run, since it waited for other ranks
    or, on a busy machine, for a core: they count as communication, as far as operations leave them. "rest" is the rest
    of elapsed_s: Python, autograd, views and the profiler; on a device, where kernels may overlap, also time without
    kernels.
    """
    seconds = dict.fromkeys(CAUSES, 0.0)
    for event in events:
        seconds[cause_of(event.name)] += self_time_s(event, on_device=on_device)
    del seconds["rest"]
    left = max(0.0, elapsed_s - sum(seconds.values()))
    waited = max(0.0, min(left, waited_s))
    seconds["communication"] += waited
    seconds["rest"] = left - waited
    return seconds


def time_by_region(events: Sequence[FunctionEvent], *, on_device: bool = False) -> dict[str, float]:
    """Seconds of each region, in the order of REGIONS: of the kernels launched in it, or on the host."""
    seconds: dict[str, float] = dict.fromkeys(REGIONS, 0.0)
    regions = sorted((event for event in events if event.name in seconds), key=lambda event: event.time_range.start)
    if not on_device:
        for event in regions:
            seconds[event.name] += event.cpu_time_total / 1e6
        return seconds
    # By the time of the launch: on a device, backward launches from a thread of autograd.
    starts = [event.time_range.start for event in regions]
    for event in events:
        place = bisect_right(starts, event.time_range.start) - 1
        if place >= 0 and event.time_range.start <= regions[place].time_range.end:
            seconds[regions[place].name] += self_time_s(event, on_device=True)
    return seconds


def top_operations(events: Sequence[FunctionEvent], count: int, *, on_device: bool = False) -> list[Operation]:
    """The operations with the longest time by themselves."""
    times, calls = Counter[str](), Counter[str]()
    for event in events:
        if not event.is_user_annotation:
            times[event.name] += self_time_s(event, on_device=on_device)  # type: ignore[assignment]
            calls[event.name] += 1
    return [Operation(name, time_s, calls[name]) for name, time_s in times.most_common(count)]
