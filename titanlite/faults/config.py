"""The [faults] section."""

from dataclasses import dataclass
from typing import Literal

from titanlite.runtime.errors import ranged


@dataclass(frozen=True)
class FaultsConfig:
    """What a run does about numbers that are wrong."""

    on_nonfinite: Literal["skip", "stop"] = "skip"
    """Steps whose loss or gradient norm is NaN or infinite never change the weights. skip: training continues; stop:
    the run stops at the next log line."""
    max_skipped_steps: int = ranged(10, "0 stops after the first skipped step", least=0)
    """The run stops at the next log line after more skipped steps in a row than this."""
    check_replicas_every: int = ranged(100, "0 disables the check", least=0)
    """Interval in steps of the comparison of replicated weights and optimizer state, bit for bit, between their ranks;
    also compared before each save. 0: never."""
