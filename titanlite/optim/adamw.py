"""AdamW (Loshchilov, Hutter, "Decoupled Weight Decay Regularization", 2019)."""

from typing import Any

import torch

from titanlite.optim.optimizer import OptimizerConfig, OptimizerKind, without_compiler
from titanlite.parallel.mesh import Sharing

EagerAdamW = without_compiler(torch.optim.AdamW)


def build(
    groups: list[dict[str, Any]],
    section: OptimizerConfig,
    implementation: str,
    device: torch.device,
    sharing: Sharing,  # noqa: ARG001
) -> torch.optim.AdamW:
    fused = implementation == "fused"
    return EagerAdamW(
        groups,
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        foreach=implementation == "foreach",
        fused=fused,
        # Keeps step counts on the device, where updates are decided; torch supports this on accelerators only.
        capturable=not fused and device.type != "cpu",
    )


ADAMW = OptimizerKind(build, has_fused=True)
