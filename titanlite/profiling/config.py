"""The [profiling] section."""

from collections.abc import Sequence
from dataclasses import dataclass

from titanlite.runtime.errors import Needs, Problem, check_ranges, ranged, require

TRACES_FOLDER = "traces"
SNAPSHOTS_FOLDER = "memory_snapshots"


@dataclass(frozen=True)
class ProfilingConfig:
    """Traces and memory snapshots of some steps, for their viewers."""

    enable_trace: bool = False
    """Write a trace by torch's profiler into traces/step-N of job.dump_folder. N is the last step in it."""
    enable_memory_snapshot: bool = False
    """Record allocations of CUDA memory, and write a snapshot into memory_snapshots/step-N of job.dump_folder after the
    last step of each trace, whether traces are enabled or not. The snapshot that a run writes when its memory runs out
    has the recorded allocations, too."""
    interval: int = ranged(500, "1 with wait = 0, warmup = 0 and active = 1 traces every step", least=1)
    """Steps from one trace to the next. Each interval begins with `wait` steps, then `warmup`, then `active`."""
    wait: int = ranged(5, "0 starts at the first step", least=0)
    """Steps of an interval before the warm-up of its trace."""
    warmup: int = ranged(3, "0 for no warm-up", least=0)
    """Steps with the profiler on whose events are dropped: its start distorts them."""
    active: int = ranged(2, "set a positive number", least=1)
    """Steps in a trace."""
    ranks: tuple[int, ...] = (0,)
    """Ranks that write traces and snapshots."""

    @property
    def last(self) -> int:
        """The last step of a trace, counted from 1 at the start of its interval."""
        return self.wait + self.warmup + self.active

    def place(self, step: int) -> int:
        """The place of a step in its interval, from 1."""
        return (step - 1) % self.interval + 1


_TRACES = Needs(
    "profiling.enable_trace or enable_memory_snapshot",
    lambda section: section.enable_trace or section.enable_memory_snapshot,
)
NEEDS = dict.fromkeys(("interval", "wait", "warmup", "active", "ranks"), _TRACES)
"""See Needs."""


def check_profiling(section: ProfilingConfig, *, world_size: int, device_type: str, steps: int) -> list[Problem]:
    """Check [profiling]. steps: training.steps."""
    key = "profiling"
    problems = check_ranges(section, key)
    if problems or not (section.enable_trace or section.enable_memory_snapshot):
        return problems
    return [
        *require(
            not section.enable_memory_snapshot or device_type == "cuda",
            f"{key}.enable_memory_snapshot",
            section.enable_memory_snapshot,
            "only on CUDA: torch records no allocations of host memory",
            f"leave it out; `titanlite plan` estimates the memory, {key}.enable_trace works on a CPU",
        ),
        *require(
            section.last <= section.interval,
            f"{key}.interval",
            section.interval,
            f"at least wait + warmup + active = {section.last}",
            f"set {key}.interval = {section.last}, or fewer steps of wait, warmup or active",
        ),
        *require(
            section.last <= steps,
            f"{key}.wait",
            section.wait,
            f"wait + warmup + active = {section.last} at most training.steps = {steps}: else no trace is written",
            f"set fewer steps of {key}.wait, warmup or active, or more training.steps",
        ),
        *_check_ranks(section.ranks, world_size),
    ]


def _check_ranks(ranks: Sequence[int], world_size: int) -> list[Problem]:
    return require(
        len(ranks) == len(set(ranks)) > 0 and all(0 <= rank < world_size for rank in ranks),
        "profiling.ranks",
        list(ranks),
        f"one or more ranks of this run, each once, from 0 to {world_size - 1}",
        "profiling.ranks = [0]",
    )
