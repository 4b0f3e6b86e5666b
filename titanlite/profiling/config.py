"""The [profiling] section."""

from dataclasses import dataclass
from typing import ClassVar

from titanlite.runtime.errors import Problem, Rules
from titanlite.runtime.settings import Affects, Needs, setting

TRACES_FOLDER = "traces"
SNAPSHOTS_FOLDER = "memory_snapshots"


_TRACES = Needs(
    "profiling.enable_trace or enable_memory_snapshot",
    lambda section: section.enable_trace or section.enable_memory_snapshot,
)


@dataclass(frozen=True)
class ProfilingConfig:
    """Traces and memory snapshots of some steps, for their viewers."""

    AFFECTS: ClassVar[Affects] = "nothing"

    enable_trace: bool = False
    """Write a trace by torch's profiler into traces/step-N of job.dump_folder. N is the last step in it."""
    enable_memory_snapshot: bool = False
    """Record allocations of CUDA memory, and write a snapshot into memory_snapshots/step-N of job.dump_folder after the
    last step of each trace, whether traces are enabled or not. The snapshot that a run writes when its memory runs out
    has the recorded allocations, too."""
    interval: int = setting(500, "1 with wait = 0, warmup = 0 and active = 1 traces every step", least=1, needs=_TRACES)
    """Steps from one trace to the next. Each interval begins with `wait` steps, then `warmup`, then `active`."""
    wait: int = setting(5, "0 starts at the first step", least=0, needs=_TRACES)
    """Steps of an interval before the warm-up of its trace."""
    warmup: int = setting(3, "0 for no warm-up", least=0, needs=_TRACES)
    """Steps with the profiler on whose events are dropped: its start distorts them."""
    active: int = setting(2, "set a positive number", least=1, needs=_TRACES)
    """Steps in a trace."""
    ranks: tuple[int, ...] = setting((0,), needs=_TRACES)
    """Ranks that write traces and snapshots."""

    @property
    def last(self) -> int:
        """The last step of a trace, counted from 1 at the start of its interval."""
        return self.wait + self.warmup + self.active

    def place(self, step: int) -> int:
        """The place of a step in its interval, from 1."""
        return (step - 1) % self.interval + 1


def check_profiling(section: ProfilingConfig, *, world_size: int, device_type: str, steps: int) -> list[Problem]:
    """Check [profiling]. steps: training.steps."""
    rules = Rules("profiling", section)
    if not (section.enable_trace or section.enable_memory_snapshot):
        return rules.problems
    records = not section.enable_memory_snapshot or device_type == "cuda"
    remedy = "leave it out; `titanlite plan` estimates the memory, profiling.enable_trace works on a CPU"
    rules.require("enable_memory_snapshot", records, "only on CUDA", remedy)
    total, remedy = f"wait + warmup + active = {section.last}", "set fewer steps of wait, warmup or active"
    rules.require("interval", section.last <= section.interval, f"at least {total}", remedy)
    rule = f"{total} at most training.steps = {steps}: else no trace is written"
    rules.require("wait", section.last <= steps, rule, remedy)
    once = len(section.ranks) == len({*section.ranks} & {*range(world_size)}) > 0
    rule = f"one or more ranks of this run, each once, from 0 to {world_size - 1}"
    rules.require("ranks", once, rule, "profiling.ranks = [0]")
    return rules.problems
