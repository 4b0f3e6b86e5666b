"""The process's place in the world: device, backend, process group, and a clean end for all ranks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CommConfig:
    """How long ranks wait for each other."""

    init_timeout_s: int = 300
    """Seconds for start-up collectives, until the first step is done."""
    train_timeout_s: int = 100
    """Seconds for a collective after the first step."""
