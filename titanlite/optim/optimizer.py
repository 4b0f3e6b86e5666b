"""The interface of optimizers, and conditional updates that are decided on the device."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from titanlite.runtime.dtensors import local_part
from titanlite.runtime.errors import ranged


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and its hyper-parameters."""

    name: str = "AdamW"
    """Optimizer. SGD has no momentum, and no state."""
    lr: float = ranged(3e-4, "3e-4 is a usual start", above=0)
    """Peak learning rate; [lr_schedule] scales it at each step."""
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
    """auto: fused AdamW, foreach SGD. torch has no fused SGD for sharded parameters."""


AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


def without_compiler(kind: type[AnyOptimizer]) -> type[AnyOptimizer]:
    """A subclass of a torch optimizer with the same methods, which do not import torch._dynamo.

    torch wraps them for programs that compile the optimizer. The wrappers import torch._dynamo at their first call,
    which takes 0.6 seconds of CPU time.
    """
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in ("add_param_group", "zero_grad")}
    return type(kind.__name__, (kind,), {**methods, "step": torch.no_grad()(inspect.unwrap(kind.step))})


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer: an entry of titanlite.optim.registry, chosen by optimizer.name.

    build(groups, section, implementation, device): torch's optimizer; groups have parameter names and weight decay.
    has_fused: whether torch has a fused form for sharded parameters, whose kernel can skip an update.
    """

    build: Callable[[list[dict[str, Any]], OptimizerConfig, str, torch.device], torch.optim.Optimizer]
    has_fused: bool


class GatedOptimizer:
    """A torch optimizer with conditional updates that need no host read.

    optimizer: the torch optimizer; its groups have parameter names. `step_if(ok)` with a false `ok` leaves weights,
    moments and step counts unchanged, bit for bit.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, gated_by_kernel: bool) -> None:
        self.optimizer = optimizer
        self._gated_by_kernel = gated_by_kernel
        self._has_all_state = False

    def init_state(self) -> None:
        """Create missing state: moments and step counts of 0. Clears the gradients if state is missing."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        missing = [parameter for parameter in parameters if not self.optimizer.state[parameter]]
        if missing and not self._has_all_state:  # SGD never has state
            for parameter in missing:
                parameter.grad = torch.zeros_like(parameter)
            self.step_if(torch.zeros((), dtype=torch.bool, device=parameters[0].device))
            self.zero_grad()
        self._has_all_state = True

    def named_state(self) -> Iterable[tuple[str, Tensor]]:
        """("<parameter>/<state>", tensor) of all existing state, in the order of the groups."""
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
        """Update if `ok`, a bool scalar on the device, the same on all ranks; otherwise change nothing."""
        if self._gated_by_kernel:
            # Fused AdamW reads this attribute: its kernel skips the update if the value is not 0.
            self.optimizer.found_inf = (~ok).to(torch.float32)  # type: ignore[attr-defined]
            self.optimizer.step()
            return
        # Other implementations cannot skip: update, then restore. This costs a copy of weights and moments.
        before = {key: tensor.clone() for key, tensor in self._tensors()}
        self.optimizer.step()
        for key, tensor in self._tensors():
            # State that this step created was zero before.
            tensor.copy_(torch.where(ok, tensor, before.get(key, torch.zeros((), dtype=tensor.dtype))))

    def _tensors(self) -> Iterable[tuple[tuple[int, str], Tensor]]:
        """Local shards of all tensors that a step changes: parameters with gradients, and their state."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield (id(parameter), "parameter"), local_part(parameter)
                    for name, value in self.optimizer.state[parameter].items():
                        if isinstance(value, Tensor):
                            yield (id(parameter), name), local_part(value)
