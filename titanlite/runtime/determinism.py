"""Seeds and deterministic algorithms."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DebugConfig:
    """What makes runs repeatable."""

    seed: int = 0
    """Seed of the initial weights."""
    deterministic: bool = False
    """Deterministic algorithms only; cuDNN without benchmark, a fixed CUBLAS_WORKSPACE_CONFIG."""
    deterministic_warn_only: bool = False
    """With deterministic: operations without a deterministic form warn instead of failing."""
