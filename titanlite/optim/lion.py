"""Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023)."""

import torch
from torch import Tensor

from titanlite.optim.optimizer import Arguments, OptimizerKind, SkippingOptimizer
from titanlite.runtime.dtensors import local_part


class Lion(SkippingOptimizer):
    """The sign of a mixture of momentum and gradient, with decoupled weight decay.

    State: momentum, of the parameter's shape, dtype and placement.
    """

    def zero_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(parameter, requires_grad=False)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update all parameters with a gradient, unless found_inf."""
        self.init_state()
        ok = self.found_inf == 0
        for parameter, group in self.each():
            if parameter.grad is None:
                continue
            weights, momentum = local_part(parameter), local_part(self.state[parameter]["momentum"])
            wide, (beta1, beta2) = torch.promote_types(weights.dtype, torch.float32), group["betas"]
            gradient, before = local_part(parameter.grad).to(wide), momentum.to(wide)
            direction = before.lerp(gradient, 1 - beta1).sign_()
            updated = (weights.to(wide) * (1 - group["lr"] * group["weight_decay"])).sub_(direction, alpha=group["lr"])
            weights.copy_(torch.where(ok, updated.to(weights.dtype), weights))
            momentum.copy_(torch.where(ok, before.lerp(gradient, 1 - beta2).to(momentum.dtype), momentum))


def build(arguments: Arguments) -> Lion:
    return Lion(arguments.groups, {"lr": arguments.section.lr})


LION = OptimizerKind(build, options=("beta1", "beta2"))
