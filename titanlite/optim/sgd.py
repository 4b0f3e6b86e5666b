"""SGD without momentum, and without state."""

from typing import Any

import torch

from titanlite.optim.optimizer import OptimizerConfig, OptimizerKind, without_compiler
from titanlite.parallel.mesh import Sharing

EagerSGD = without_compiler(torch.optim.SGD)


def build(
    groups: list[dict[str, Any]],
    section: OptimizerConfig,
    implementation: str,
    device: torch.device,  # noqa: ARG001
    sharing: Sharing,  # noqa: ARG001
) -> torch.optim.SGD:
    return EagerSGD(groups, lr=section.lr, foreach=implementation == "foreach")


SGD = OptimizerKind(build, has_fused=False)
