"""Check 8: where the time of a step is spent: the kernels that take most of it, and how long the device is idle."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from gpu_checks.benchmark import COMPILED, OwnLoop, layers_of, no_mark
from gpu_checks.rows import Emit, Found, Row, Value, WrongError, run_case
from gpu_checks.workload import Setup, one_rank

CHECK = "8 profile"
STEPS = 3
MOST_IDLE = 0.1
"""Share of the time in which the device may do nothing while the host, with the profiler, launches the next work."""
SHOWN = 15
KINDS = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}
"""Categories of the work of a device in a trace."""

Interval = tuple[float, float]
"""Begin and end, in microseconds."""


def check(emit: Emit, setup: Setup) -> None:
    """The compiled step in the benchmark's smaller shape."""

    def run() -> Found:
        loop = OwnLoop(setup, COMPILED, layers_of(setup)[0])
        for _ in range(3):
            loop.step(no_mark)
        found = recorded(setup, lambda: loop.step(no_mark))
        for row in rows(CHECK, found):
            emit(row)
        return busy(setup, found)

    with one_rank(setup):
        emit(run_case(CHECK, "idle share", run))


def recorded(setup: Setup, step: Callable[[], object]) -> list[tuple[str, Interval]]:
    """Names and intervals of the device's work in STEPS steps, those of operations inside of others left out."""
    setup.synchronize()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setup.device_type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            step()
        setup.synchronize()
    file = Path(setup.folder, "trace.json")
    profiler.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    file.unlink()
    return device_work(events, KINDS[setup.device_type])


def device_work(events: Iterable[Mapping[str, Any]], kinds: Sequence[str]) -> list[tuple[str, Interval]]:
    """The events of these categories, by begin; an operation that others run inside of is one event."""
    found: list[tuple[str, Interval]] = []
    chosen = [event for event in events if event.get("cat") in kinds and event.get("ph") == "X"]
    for event in sorted(chosen, key=lambda event: (event["ts"], -event["dur"])):
        begin, end = event["ts"], event["ts"] + event["dur"]
        is_inside = event["cat"] == "cpu_op" and bool(found) and end <= found[-1][1][1]
        if not is_inside:
            found.append((event["name"], (begin, end)))
    return found


def rows(check: str, found: Sequence[tuple[str, Interval]], what: str = "") -> list[Row]:
    """The names with most time, over all steps. what: is profiled, before the name of a row."""
    times: dict[str, list[float]] = defaultdict(list)
    for name, (begin, end) in found:
        times[name].append(end - begin)
    total = sum(map(sum, times.values()))
    top = sorted(times, key=lambda name: -sum(times[name]))[:SHOWN]
    made = []
    for place, name in enumerate(top, 1):
        share, ms, calls = sum(times[name]) / total, sum(times[name]) / STEPS / 1000, len(times[name]) / STEPS
        text = f"{share:.1%}, {ms:.3f} ms in {calls:g} calls per step: {name[:120]}"
        values: dict[str, Value] = {"kernel": name, "share": share, "ms": ms, "calls": calls}
        made.append(Row(check, f"{what}kernel {place:>2}", "measured", text, values))
    return made


def busy(setup: Setup, found: Sequence[tuple[str, Interval]]) -> Found:
    """The share of the time from the first to the last work in which the device does nothing."""
    if not found:
        raise WrongError("the trace has no work of the device")
    share = idle_share([interval for _, interval in found])
    text = f"{share:.1%} of {STEPS} steps in a row (bound {MOST_IDLE:.0%})"
    if share > MOST_IDLE and not setup.tiny:  # small shapes measure the host
        raise WrongError(text)
    return Found(text, {"share": share}, measured=setup.tiny)


def idle_share(intervals: Sequence[Interval]) -> float:
    """The share of the time from the first begin to the last end that no interval covers."""
    ordered = sorted(intervals)
    first, covered, until = ordered[0][0], 0.0, ordered[0][0]
    for begin, end in ordered:
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return 1 - covered / (until - first)
