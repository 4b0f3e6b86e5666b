"""The optimizer: groups by parameter name, and updates that are gated on the device."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.runtime.errors import Problem, check_ranges, ranged, require


@dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer, and its hyper-parameters."""

    name: Literal["AdamW", "SGD"] = "AdamW"
    """SGD is plain: no momentum, hence no state."""
    lr: float = ranged(3e-4, "3e-4 is a usual start", above=0)
    """Peak learning rate; [lr_schedule] scales it step by step."""
    beta1: float = ranged(0.9, "0.9 is the usual value", least=0, below=1)
    """AdamW: decay of the first moment."""
    beta2: float = ranged(0.95, "0.95 is the usual value", least=0, below=1)
    """AdamW: decay of the second moment."""
    eps: float = ranged(1e-8, "1e-8 is the usual value", above=0)
    """AdamW: added to the denominator."""
    weight_decay: float = ranged(0.1, "0 switches weight decay off", least=0)
    """Decoupled weight decay (AdamW), or added to the gradient (SGD)."""
    weight_decay_skip: tuple[str, ...] = ("*norm*", "*bias*")
    """Parameters without weight decay: shell patterns, matched against the full parameter name."""
    implementation: Literal["auto", "fused", "foreach", "for-loop"] = "auto"
    """auto: fused AdamW, foreach SGD. Fused SGD is refused: torch has none for sharded parameters."""


def check_optimizer(section: OptimizerConfig) -> list[Problem]:
    """Ranges, and what torch cannot do."""
    key = "optimizer"
    return [
        *check_ranges(section, key),
        *require(
            not (section.name == "SGD" and section.implementation == "fused"),
            f"{key}.implementation",
            section.implementation,
            "SGD has no fused form for sharded parameters in torch",
            'use "auto" or "foreach", or optimizer.name = "AdamW"',
        ),
    ]


class GatedOptimizer:
    """A torch optimizer whose update happens, or not, by a decision that never leaves the device.

    optimizer: the torch optimizer, its groups carrying parameter names. `step_if(ok)` with a false `ok` leaves
    weights, moments and step counts unchanged, bit for bit.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, gated_by_kernel: bool) -> None:
        self.optimizer = optimizer
        self._gated_by_kernel = gated_by_kernel

    def init_state(self) -> None:
        """Makes the state that torch makes at the first update, where there is none: moments and step counts of 0."""
        if not isinstance(self.optimizer, torch.optim.AdamW):
            return  # plain SGD has none
        for group in self.optimizer.param_groups:
            on_device = group["fused"] or group["capturable"]
            for parameter in group["params"]:
                if not self.optimizer.state[parameter]:
                    device = parameter.device if on_device else torch.device("cpu")
                    self.optimizer.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32, device=device),
                        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    }

    def named_state(self) -> Iterable[tuple[str, Tensor]]:
        """("<parameter>/<state>", tensor) of all state that there is, in the order of the groups."""
        for group in self.optimizer.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                for key, value in self.optimizer.state[parameter].items():
                    yield f"{name}/{key}", value

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step_if(self, ok: Tensor) -> None:
        """One update where `ok` (bool scalar on the device, the same on all ranks) holds, nothing otherwise."""
        if self._gated_by_kernel:
            # Fused AdamW reads this attribute: the kernel itself skips the update where it is not 0.
            self.optimizer.found_inf = (~ok).to(torch.float32)  # type: ignore[attr-defined]
            self.optimizer.step()
            return
        # The other implementations know no gate: update, then take back. Costs a copy of weights and moments.
        before = {key: tensor.clone() for key, tensor in self._tensors()}
        self.optimizer.step()
        for key, tensor in self._tensors():
            # State that this very step created started from zero.
            tensor.copy_(torch.where(ok, tensor, before.get(key, torch.zeros((), dtype=tensor.dtype))))

    def _tensors(self) -> Iterable[tuple[tuple[int, str], Tensor]]:
        """This rank's part of all that a step changes: parameters with gradients, and their state."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield (id(parameter), "parameter"), _local(parameter)
                    for name, value in self.optimizer.state[parameter].items():
                        if isinstance(value, Tensor):
                            yield (id(parameter), name), _local(value)


def build_optimizer(section: OptimizerConfig, model_parts: Iterable[nn.Module], device: torch.device) -> GatedOptimizer:
    """The optimizer of all parameters of `model_parts`, in two groups: with and without weight decay."""
    named = {name: parameter for part in model_parts for name, parameter in part.named_parameters()}
    skipped = {name for name in named if any(fnmatchcase(name, pattern) for pattern in section.weight_decay_skip)}
    groups = [
        {"params": [(n, p) for n, p in named.items() if n not in skipped], "weight_decay": section.weight_decay},
        {"params": [(n, p) for n, p in named.items() if n in skipped], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    auto = "fused" if section.name == "AdamW" else "foreach"
    implementation = auto if section.implementation == "auto" else section.implementation
    options: dict[str, Any] = {"lr": section.lr, "foreach": implementation == "foreach"}
    if section.name == "SGD":
        return GatedOptimizer(torch.optim.SGD(groups, **options), gated_by_kernel=False)
    fused = implementation == "fused"
    adamw = torch.optim.AdamW(
        groups,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        fused=fused,
        # Step counts live on the device, where the gate is; torch allows (and needs) that on accelerators only.
        capturable=not fused and device.type != "cpu",
        **options,
    )
    return GatedOptimizer(adamw, gated_by_kernel=fused)


def state_bytes(section: OptimizerConfig, parameter_bytes: int, num_tensors: int) -> int:
    """Bytes of the state after a step, of parameters of so many bytes in so many tensors, on one rank.

    AdamW: two moments in the parameter's dtype, and a float32 step count per tensor, where that lives on the device
    (fused, or any form on an accelerator) or on the host. SGD has none.
    """
    return 2 * parameter_bytes + 4 * num_tensors if section.name == "AdamW" else 0


def update_bytes(section: OptimizerConfig, parameter_bytes: int, num_tensors: int) -> int:
    """Bytes that an update takes beside gradients and state: forms that cannot be gated by their kernel keep copies of
    parameters and state, and make new ones of both, a tensor at a time."""
    fused = section.name == "AdamW" and section.implementation in ("auto", "fused")
    return 0 if fused else parameter_bytes + state_bytes(section, parameter_bytes, num_tensors)


def _local(tensor: Tensor) -> Tensor:
    """The plain tensor that this rank holds; shares memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
