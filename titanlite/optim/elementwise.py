"""SGD, AdamW and Lion: each element of a parameter is updated by itself."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from titanlite.models.init import local_region
from titanlite.optim.optimizer import Arguments, OptimizerKind, SkippingOptimizer, update_weights_, without_compiler
from titanlite.optim.rounding import round_to_bfloat16
from titanlite.runtime.torch_internals import fused_adamw_, local_part

ALIGNMENT = 64
EagerAdamW = without_compiler(torch.optim.AdamW)
EagerSGD = without_compiler(torch.optim.SGD)


class ComposedAdamW(SkippingOptimizer):
    """AdamW (Loshchilov, Hutter, "Decoupled Weight Decay Regularization", 2019) of single operations, for moments in
    bfloat16 and cautious weight decay, which torch's kernel lacks.

    It computes in promote_types(dtype of the weights, float32).

    State: exp_avg and exp_avg_sq, of the parameter's shape and placement, and step, a float32 scalar. Stochastic
    rounding draws a word for each (seed, step, name of the parameter, index in the full parameter), so that all meshes
    round alike.
    """

    def __init__(self, arguments: Arguments) -> None:
        section = arguments.section
        super().__init__(arguments.groups, {"lr": section.lr, "eps": section.eps})
        self._dtype = torch.bfloat16 if section.state_dtype == "bfloat16" else None
        self._seed = arguments.seed if self._dtype and section.state_rounding == "stochastic" else None
        self._names = {
            parameter: name
            for group in self.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        }

    def zero_state(self, parameter: Tensor) -> dict[str, Tensor]:
        first, second = (torch.zeros_like(parameter, dtype=self._dtype, requires_grad=False) for _ in range(2))
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
            means = first.to(wide).lerp(gradient, 1 - beta1), second.to(wide).lerp(gradient.square(), 1 - beta2)
            denominator = (means[1] / (1 - beta2**step)).sqrt_().add_(group["eps"])
            update = (means[0] / (1 - beta1**step)).div_(denominator)
            update_weights_(weights, update, group, ok)
            for moment, rounded in zip((first, second), self._rounded(means, parameter, step), strict=True):
                moment.copy_(torch.where(ok, rounded, moment))

    def _rounded(self, means: Sequence[Tensor], parameter: Tensor, step: Tensor) -> list[Tensor]:
        if self._seed is None:
            return [mean.to(self._dtype or parameter.dtype) for mean in means]
        _, shape, offset = local_region(parameter)
        return round_to_bfloat16(means, self._seed, step, self._names[parameter], shape, offset)


class AlignedAdamW(SkippingOptimizer):
    """AdamW by torch's fused kernel, whose update of an element does not depend on where this rank's shard ends.

    The kernel for CPUs rounds the last elements of a tensor in another way, if they do not fill a vector register. So
    it gets the elements up to the last multiple of 64, and a padded copy of the rest.

    State: that of torch.optim.AdamW.
    """

    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments.groups, {"lr": arguments.section.lr, "eps": arguments.section.eps})

    def zero_state(self, parameter: Tensor) -> dict[str, Tensor]:
        first, second = (torch.zeros_like(parameter, requires_grad=False) for _ in range(2))
        step = torch.zeros((), dtype=torch.float32, device=local_part(parameter).device)
        return {"step": step, "exp_avg": first, "exp_avg_sq": second}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update all parameters with a gradient, unless found_inf."""
        self.init_state()
        for group in self.param_groups:
            states = [(each, self.state[each]) for each in group["params"] if each.grad is not None]
            every = [
                [local_part(tensor).view(-1) for tensor in (each, each.grad, state["exp_avg"], state["exp_avg_sq"])]
                for each, state in states
            ]
            steps = [state["step"].add_(1 - self.found_inf) for _, state in states]
            ends = [len(tensors[0]) // ALIGNMENT * ALIGNMENT for tensors in every]
            tails = [[each[end:] for each in tensors] for tensors, end in zip(every, ends, strict=True)]
            padded = [[functional.pad(each, (0, ALIGNMENT - len(each))) for each in tensors] for tensors in tails]
            heads = [[each[:end] for each in tensors] for tensors, end in zip(every, ends, strict=True)]
            fused_adamw_([*heads, *padded], [*steps, *steps], group, self.found_inf)
            for tensors, updated in zip(tails, padded, strict=True):
                for tail, values in zip(tensors, updated, strict=True):
                    tail.copy_(values[: len(tail)])


def build_adamw(arguments: Arguments) -> torch.optim.Optimizer:
    if arguments.section.state_dtype == "bfloat16" or arguments.section.cautious_weight_decay:
        return ComposedAdamW(arguments)
    if arguments.bit_equal:
        return AlignedAdamW(arguments)
    return EagerAdamW(arguments.groups, lr=arguments.section.lr, eps=arguments.section.eps, fused=True)


ADAMW = OptimizerKind(build_adamw, options=("beta1", "beta2"))


def build_sgd(arguments: Arguments) -> torch.optim.SGD:
    """SGD, with momentum if optimizer.momentum is above 0 (Sutskever et al., "On the importance of initialization and
    momentum in deep learning", 2013, in torch's form: momentum <- decay * momentum + gradient).

    torch has no fused SGD for sharded parameters.

    On a CPU, foreach is no faster, and takes seconds on a mesh of several axes, where DTensor tries all placements. In
    float32 and float64, both forms have the same bits; in bfloat16 they round differently.
    """
    (_, first), *_ = arguments.groups[0]["params"]
    foreach = arguments.device.type != "cpu" or first.dtype not in (torch.float32, torch.float64)
    return EagerSGD(arguments.groups, lr=arguments.section.lr, foreach=foreach)


SGD = OptimizerKind(build_sgd, options=("momentum",))


class Lion(SkippingOptimizer):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023): the sign of a mixture of momentum and
    gradient, with decoupled weight decay.

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
            update_weights_(weights, direction, group, ok)
            momentum.copy_(torch.where(ok, before.lerp(gradient, 1 - beta2).to(momentum.dtype), momentum))


LION = OptimizerKind(lambda arguments: Lion(arguments.groups, {"lr": arguments.section.lr}), options=("beta1", "beta2"))
