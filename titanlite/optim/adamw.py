"""AdamW (Loshchilov, Hutter, "Decoupled Weight Decay Regularization", 2019)."""

from typing import Any

import torch
from torch import Tensor

from titanlite.optim.optimizer import OptimizerConfig, OptimizerKind


def build(
    groups: list[dict[str, Any]], section: OptimizerConfig, implementation: str, device: torch.device
) -> torch.optim.AdamW:
    fused = implementation == "fused"
    return torch.optim.AdamW(
        groups,
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        foreach=implementation == "foreach",
        fused=fused,
        # Keeps step counts on the device, where updates are decided; torch supports this on accelerators only.
        capturable=not fused and device.type != "cpu",
    )


def init_state(group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    device = parameter.device if group["fused"] or group["capturable"] else torch.device("cpu")
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }


ADAMW = OptimizerKind("AdamW", build, init_state, moments=2, counts_steps=True, has_fused=True)
