"""Seeds and deterministic algorithms."""

import hashlib
import os
from dataclasses import dataclass

import torch

from titanlite.runtime.errors import ranged


@dataclass(frozen=True)
class DebugConfig:
    """What makes runs repeatable."""

    seed: int = ranged(0, "any such number is as good", least=0, most=2**63 - 1)
    """Seed of all random numbers but the order of the data: initial weights, and what a model draws in training."""
    deterministic: bool = False
    """Deterministic algorithms only; cuDNN without benchmark, a fixed CUBLAS_WORKSPACE_CONFIG."""
    deterministic_warn_only: bool = False
    """With deterministic: operations without a deterministic form warn instead of failing."""


def apply_determinism(section: DebugConfig) -> None:
    """Process-wide; called before the first CUDA call, since cuBLAS reads its variable once."""
    if not section.deterministic:
        return
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=section.deterministic_warn_only)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def seed_microbatch(seed: int, step: int, sequence: int, pp_rank: int, device: torch.device) -> None:
    """Seed torch's own generators, for a model that draws from them, as a function of the arguments alone.

    A run that goes on on the same layout so repeats these draws; on another layout they are other numbers. `sequence`:
    the first of the microbatch. pp_rank: stages of a pipeline draw independently of each other, tp ranks alike.
    The device is not asked. The CPU's generator uses 32 bits of what is derived here.
    """
    digest = hashlib.sha256(f"{seed}:{step}:{sequence}:{pp_rank}".encode()).digest()
    derived = int.from_bytes(digest[:8], "little")
    # torch.manual_seed does the same for every kind of device, and takes a hundred times as long.
    torch.default_generator.manual_seed(derived)
    if device.type == "cuda":
        torch.cuda.manual_seed(derived)
