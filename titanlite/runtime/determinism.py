"""Deterministic algorithms."""

import os
from dataclasses import dataclass

import torch

from titanlite.runtime.settings import setting


@dataclass(frozen=True)
class DebugConfig:
    """Seed and deterministic algorithms."""

    seed: int = setting(0, "choose any integer in this range", least=0, most=2**63 - 1)
    """Seed of initial weights and of random numbers drawn by the model; data.seed is the seed of the data order."""
    deterministic: bool = False
    """Use deterministic algorithms only; disables cuDNN's benchmark and sets CUBLAS_WORKSPACE_CONFIG."""


def apply_determinism(section: DebugConfig) -> None:
    """Apply [debug] process-wide. To be called before the first CUDA call: cuBLAS reads its variable once."""
    if not section.deterministic:
        return
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
