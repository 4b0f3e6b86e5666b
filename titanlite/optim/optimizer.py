"""The interface of optimizers, and conditional updates that are decided on the device."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from titanlite.parallel.mesh import Sharing
from titanlite.runtime.dtensors import local_part
from titanlite.runtime.errors import ranged


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and its hyper-parameters."""

    name: str = "AdamW"
    """Optimizer. SGD has no momentum, and no state. Muon: for matrices in blocks; AdamW for all other parameters."""
    lr: float = ranged(3e-4, "3e-4 is a usual start", above=0)
    """Peak learning rate; [lr_schedule] scales it at each step."""
    beta1: float = ranged(0.9, "0.9 is the usual value", least=0, below=1)
    """AdamW: decay of the first moment."""
    beta2: float = ranged(0.95, "0.95 is the usual value", least=0, below=1)
    """AdamW: decay of the second moment."""
    eps: float = ranged(1e-8, "1e-8 is the usual value", above=0)
    """AdamW: added to the denominator."""
    momentum: float = ranged(0.95, "0.95 is the usual value", least=0, below=1)
    """Muon: decay of the momentum."""
    nesterov: bool = True
    """Muon: orthogonalize the gradient mixed with the momentum once more, instead of the momentum."""
    newton_schulz_steps: int = ranged(5, "5 is the usual number", least=1)
    """Muon: iterations of the orthogonalization."""
    newton_schulz_coefficients: tuple[float, ...] = (3.4445, -4.775, 2.0315)
    """Muon: a, b, c of an iteration, a X + b (X X^T) X + c (X X^T)^2 X."""
    newton_schulz_dtype: Literal["auto", "float64", "float32", "bfloat16"] = "auto"
    """Muon: dtype of the orthogonalization, and of the matrices that ranks exchange for it. auto: that of the
    parameters, at least float32."""
    muon_scale: Literal["rms", "spectral"] = "rms"
    """Muon: factor of the update of (m, n). rms: 0.2 sqrt(max(m, n)), the size of AdamW's updates, for the same lr and
    weight decay; spectral: sqrt(max(1, m / n))."""
    weight_decay: float = ranged(0.1, "0 switches weight decay off", least=0)
    """Decoupled weight decay (AdamW, Muon), or added to the gradient (SGD)."""
    weight_decay_skip: tuple[str, ...] = ("*norm*", "*bias*")
    """Parameters without weight decay: shell patterns, matched against the full parameter name."""
    ema_decay: float = ranged(0.0, "0 keeps no average; 0.999 is usual for 10,000 steps", least=0, below=1)
    """Decay per step of an average of the weights, which checkpoints have beside the weights; 0: no average."""
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

    build(groups, section, implementation, device, sharing): torch's optimizer; groups have parameter names and weight
    decay. sharing: the ranks that hold parts of the parameters. has_fused: whether torch has a fused form for sharded
    parameters. skips: whether this, or any implementation, skips an update by itself.
    """

    build: Callable[[list[dict[str, Any]], OptimizerConfig, str, torch.device, Sharing], torch.optim.Optimizer]
    has_fused: bool
    always_skips: bool = False


class GatedOptimizer:
    """Torch optimizers with conditional updates that need no host read.

    optimizers: of disjoint parameters; their groups have parameter names. can_skip: for each, whether it skips an update
    by itself, if its attribute found_inf is not 0. `step_if(ok)` with a false `ok` leaves weights, moments and step
    counts unchanged, bit for bit.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], can_skip: Sequence[bool]) -> None:
        self.optimizers = optimizers
        self._can_skip = can_skip
        self._has_all_state = False

    @property
    def param_groups(self) -> Iterable[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        """(optimizer, group) of all groups."""
        return ((optimizer, group) for optimizer in self.optimizers for group in optimizer.param_groups)

    def init_state(self) -> None:
        """Create missing state: moments and step counts of 0. Clears the gradients if state is missing."""
        missing = [
            (optimizer, parameter)
            for optimizer, group in self.param_groups
            for parameter in group["params"]
            if not optimizer.state[parameter]
        ]
        if missing and not self._has_all_state:  # SGD never has state
            for _, group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            self.step_if(torch.zeros((), dtype=torch.bool, device=missing[0][1].device))
            self.zero_grad()
        self._has_all_state = True

    def named_state(self) -> Iterable[tuple[str, Tensor]]:
        """("<parameter>/<state>", tensor) of all existing state, in the order of the groups."""
        for optimizer, group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                for key, value in optimizer.state[parameter].items():
                    yield f"{name}/{key}", value

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def set_lr(self, lr: float) -> None:
        for _, group in self.param_groups:
            group["lr"] = lr

    def step_if(self, ok: Tensor) -> None:
        """Update if `ok`, a bool scalar on the device, the same on all ranks; otherwise change nothing."""
        for optimizer, can_skip in zip(self.optimizers, self._can_skip, strict=True):
            if can_skip:
                # Fused AdamW reads this attribute, too: its kernel skips the update if the value is not 0.
                optimizer.found_inf = (~ok).to(torch.float32)  # type: ignore[attr-defined]
                optimizer.step()
                continue
            # Other implementations cannot skip: update, then restore. This costs a copy of weights and moments.
            before = {key: tensor.clone() for key, tensor in _tensors(optimizer)}
            optimizer.step()
            for key, tensor in _tensors(optimizer):
                # State that this step created was zero before.
                tensor.copy_(torch.where(ok, tensor, before.get(key, torch.zeros((), dtype=tensor.dtype))))


def _tensors(optimizer: torch.optim.Optimizer) -> Iterable[tuple[tuple[int, str], Tensor]]:
    """Local shards of all tensors that a step changes: parameters with gradients, and their state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield (id(parameter), "parameter"), local_part(parameter)
                for name, value in optimizer.state[parameter].items():
                    if isinstance(value, Tensor):
                        yield (id(parameter), name), local_part(value)
