"""The [faults] section."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from titanlite.runtime.settings import Affects, Needs, setting

_GATES = Needs("faults.spike_factor above 0", lambda section: section.spike_factor > 0)


@dataclass(frozen=True)
class FaultsConfig:
    """What a run does about numbers that are wrong."""

    AFFECTS: ClassVar[Affects] = "nothing"

    max_skipped_steps: int = setting(10, "0 stops after the first skipped step", least=0)
    """Steps whose loss or gradient norm is NaN or infinite never change the weights. The run stops at the next log line
    after more skipped steps in a row than this; 0: after the first one."""
    spike_factor: float = setting(
        0.0, "8 finds steps far off; 0 disables it", above=1, below=math.inf, unset=0, affects="numbers"
    )
    """A step is a spike if its gradient norm is above this multiple of the last 128 steps' median; 0: disabled."""
    on_spike: Literal["warn", "skip"] = setting("warn", affects="numbers", needs=_GATES)
    """What to do about a spike: warn at the next log line; or also skip its update, counted in max_skipped_steps."""
    check_replicas_every: int = setting(100, "0 disables the check", least=0)
    """Interval in steps of the comparison of replicated weights and optimizer state, bit for bit, between their ranks;
    also compared at the start, before each save and after the last step. 0: never."""
