"""Seeds and deterministic algorithms."""

import hashlib
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


def seed_microbatch(seed: int, step: int, sequence: int, part: int, device: torch.device) -> None:
    """Seed torch's generators, for models that draw from them, with a hash of the arguments.

    A resumed run on the same layout repeats the draws; on another layout they differ. sequence: the first sequence of
    the microbatch. part: of the layers and positions: pipeline stages and cp ranks draw independently of each other, tp
    ranks draw the same numbers. Does not sync with the device. The CPU's generator uses 32 bits of the derived seed.
    """
    digest = hashlib.sha256(f"{seed}:{step}:{sequence}:{part}".encode()).digest()
    derived = int.from_bytes(digest[:8], "little")
    # torch.manual_seed does the same for all device types and takes 100 times as long.
    torch.default_generator.manual_seed(derived)
    if device.type == "cuda":
        torch.cuda.manual_seed(derived)
