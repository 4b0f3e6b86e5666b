"""SGD without momentum, and without state."""

from typing import Any

import torch
from torch import Tensor

from titanlite.optim.optimizer import OptimizerConfig, OptimizerKind


def build(
    groups: list[dict[str, Any]],
    section: OptimizerConfig,
    implementation: str,
    device: torch.device,  # noqa: ARG001
) -> torch.optim.SGD:
    return torch.optim.SGD(groups, lr=section.lr, foreach=implementation == "foreach")


def init_state(group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:  # noqa: ARG001
    return {}


SGD = OptimizerKind("SGD", build, init_state, moments=0, counts_steps=False, has_fused=False)
