"""The optimizer: what a kind of it must supply, and updates that are gated on the device."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.runtime.errors import ranged


@dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer, and its hyper-parameters."""

    name: str = "AdamW"
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


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer that optimizer.name can choose: a line of titanlite.optim.registry.

    build(groups, section, implementation, device): torch's optimizer; groups carry parameter names and weight decay.
    has_fused: whether there is a fused form for sharded parameters, whose kernel itself skips an update.
    init_state(group, parameter): the state that torch makes at the first update, all of it 0; by name.
    moments: how many tensors of the parameter's size and dtype are in the state. counts_steps: whether a float32 step
    count is, too.
    """

    name: str
    build: Callable[[list[dict[str, Any]], OptimizerConfig, str, torch.device], torch.optim.Optimizer]
    init_state: Callable[[dict[str, Any], Tensor], dict[str, Tensor]]
    moments: int
    counts_steps: bool
    has_fused: bool


class GatedOptimizer:
    """A torch optimizer whose update happens, or not, by a decision that never leaves the device.

    optimizer: the torch optimizer, its groups carrying parameter names. `step_if(ok)` with a false `ok` leaves
    weights, moments and step counts unchanged, bit for bit.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, kind: OptimizerKind, *, gated_by_kernel: bool) -> None:
        self.optimizer = optimizer
        self._kind = kind
        self._gated_by_kernel = gated_by_kernel

    def init_state(self) -> None:
        """Makes the state that torch makes at the first update, where there is none: moments and step counts of 0."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if not self.optimizer.state[parameter] and (state := self._kind.init_state(group, parameter)):
                    self.optimizer.state[parameter] = state

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


def _local(tensor: Tensor) -> Tensor:
    """The plain tensor that this rank holds; shares memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
