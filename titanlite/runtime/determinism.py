"""Deterministic algorithms."""

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from titanlite.runtime.settings import setting

MOST_PRODUCT = 256
"""Elements of a cumulative sum that is computed as a product with a square matrix."""


@dataclass(frozen=True)
class DebugConfig:
    """Seed and deterministic algorithms."""

    seed: int = setting(0, "choose any integer in this range", least=0, most=2**63 - 1)
    """Seed of initial weights and of random numbers drawn by the model; data.seed is the seed of the data order."""
    deterministic: bool = False
    """Use deterministic algorithms only; disables cuDNN's benchmark and sets CUBLAS_WORKSPACE_CONFIG. On GPUs, always
    with training.bit_equal."""


def apply_determinism(section: DebugConfig) -> None:
    """Apply [debug] process-wide. To be called before the first CUDA call: cuBLAS reads its variable once."""
    if not section.deterministic:
        return
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # takes time
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def cumulative_sum(x: Tensor) -> Tensor:
    """The sums of the first elements along the last dimension, of floats. Of those on a GPU, torch's cumsum is an error
    with deterministic algorithms: they are products then, up to a length of MOST_PRODUCT, else sums on the CPU."""
    if not _is_refused(x):
        return x.cumsum(-1)
    length = x.shape[-1]
    if length > MOST_PRODUCT:
        return x.cpu().cumsum(-1).to(x.device)
    return x @ torch.ones(length, length, dtype=x.dtype, device=x.device).triu()


def _is_refused(x: Tensor) -> bool:
    """Whether torch's cumsum is an error."""
    return x.is_cuda and torch.are_deterministic_algorithms_enabled()
