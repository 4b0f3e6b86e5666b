"""Seeds and deterministic algorithms."""

import os
from dataclasses import dataclass

import torch

from titanlite.runtime.errors import Problem, require


@dataclass(frozen=True)
class DebugConfig:
    """What makes runs repeatable."""

    seed: int = 0
    """Seed of the initial weights."""
    deterministic: bool = False
    """Deterministic algorithms only; cuDNN without benchmark, a fixed CUBLAS_WORKSPACE_CONFIG."""
    deterministic_warn_only: bool = False
    """With deterministic: operations without a deterministic form warn instead of failing."""


def check_debug(section: DebugConfig) -> list[Problem]:
    return require(
        0 <= section.seed < 2**63, "debug.seed", section.seed, "from 0 to 2^63 - 1", "any such number is as good"
    )


def apply_determinism(section: DebugConfig) -> None:
    """Process-wide; called before the first CUDA call, since cuBLAS reads its variable once."""
    if not section.deterministic:
        return
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=section.deterministic_warn_only)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
