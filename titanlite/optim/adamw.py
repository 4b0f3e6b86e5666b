"""AdamW (Loshchilov, Hutter, "Decoupled Weight Decay Regularization", 2019), also with moments in bfloat16."""

from collections.abc import Sequence

import torch
from torch import Tensor

from titanlite.models.init import local_region
from titanlite.optim.optimizer import Arguments, OptimizerKind, SkippingOptimizer, without_compiler
from titanlite.optim.rounding import round_to_bfloat16
from titanlite.runtime.dtensors import local_part

EagerAdamW = without_compiler(torch.optim.AdamW)


class AdamWInBfloat16(SkippingOptimizer):
    """AdamW whose moments are bfloat16; it computes in promote_types(dtype of the weights, float32).

    State: exp_avg and exp_avg_sq, of the parameter's shape and placement, and step, a float32 scalar. Stochastic
    rounding draws a word for each (seed, step, name of the parameter, index in the full parameter), so that all meshes
    round alike.
    """

    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments.groups, {"lr": arguments.section.lr, "eps": arguments.section.eps})
        self._seed = arguments.seed if arguments.section.state_rounding == "stochastic" else None
        self._names = {
            parameter: name
            for group in self.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        }

    def zero_state(self, parameter: Tensor) -> dict[str, Tensor]:
        first, second = (torch.zeros_like(parameter, dtype=torch.bfloat16, requires_grad=False) for _ in range(2))
        step = torch.zeros((), dtype=torch.float32, device=local_part(parameter).device)
        return {"step": step, "exp_avg": first, "exp_avg_sq": second}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update all parameters with a gradient, unless found_inf."""
        self.init_state()
        ok = self.found_inf == 0
        for parameter, group in self.each():
            if parameter.grad is None:
                continue
            state, (beta1, beta2) = self.state[parameter], group["betas"]
            weights = local_part(parameter)
            wide = torch.promote_types(weights.dtype, torch.float32)
            gradient = local_part(parameter.grad).to(wide)
            step = state["step"].add_(ok).to(torch.float64)
            first, second = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
            means = first.to(wide).lerp_(gradient, 1 - beta1), second.to(wide).lerp_(gradient.square(), 1 - beta2)
            denominator = (means[1] / (1 - beta2**step)).sqrt_().add_(group["eps"])
            update = (means[0] / (1 - beta1**step)).div_(denominator)
            updated = (weights.to(wide) * (1 - group["lr"] * group["weight_decay"])).sub_(update, alpha=group["lr"])
            weights.copy_(torch.where(ok, updated.to(weights.dtype), weights))
            for moment, rounded in zip((first, second), self._rounded(means, parameter, step), strict=True):
                moment.copy_(torch.where(ok, rounded, moment))

    def _rounded(self, means: Sequence[Tensor], parameter: Tensor, step: Tensor) -> list[Tensor]:
        if self._seed is None:
            return [mean.to(torch.bfloat16) for mean in means]
        _, shape, offset = local_region(parameter)
        return round_to_bfloat16(means, self._seed, step, self._names[parameter], shape, offset)


def build(arguments: Arguments) -> torch.optim.Optimizer:
    if arguments.section.state_dtype == "bfloat16":
        return AdamWInBfloat16(arguments)
    return EagerAdamW(arguments.groups, lr=arguments.section.lr, eps=arguments.section.eps, fused=True)


ADAMW = OptimizerKind(build, options=("beta1", "beta2"))
