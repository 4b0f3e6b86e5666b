"""The interface of optimizers, and conditional updates of weights and their average that are decided on the device."""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from titanlite.parallel.mesh import ShardGroups
from titanlite.runtime.settings import Needs, setting
from titanlite.runtime.torch_internals import local_part


@dataclass(frozen=True)
class GroupConfig:
    """Parameters with an optimizer or hyper-parameters of their own; by default, those of [optimizer]."""

    parameters: tuple[str, ...] = ()
    """Full names of parameters, or shell patterns for them. A name precedes patterns of other groups."""
    optimizer: str = "auto"
    """auto: as without the group."""
    lr_factor: float = setting(1.0, "1 is the learning rate of [optimizer]", above=0)
    """Factor of the learning rate."""
    weight_decay: float = setting(-1.0, "0 switches weight decay off", least=0, unset=-1)
    """Weight decay; weight_decay_skip applies in the group, too."""
    beta2: float = setting(-1.0, "0.95 is the usual value", least=0, below=1, unset=-1)
    """AdamW, Lion: see [optimizer]."""


OWN = frozenset(("AdamW", "Muon", "Lion", "SGD"))
"""The optimizers of titanlite. One that a plugin registers may read any key of [optimizer]."""


def optimizers_of(section: "OptimizerConfig") -> set[str]:
    """Names of the optimizers that may update parameters. Beside Muon, AdamW updates those that are no matrices."""
    names = {section.name, *(group.optimizer for group in section.groups)} - {"auto"}
    return names | ({"AdamW"} if section.name == "Muon" else set())


def _uses(*names: str) -> Needs:
    """Needs one of these optimizers, or one of a plugin."""
    condition = f"the optimizer {' or '.join(names)}"
    return Needs(
        condition, lambda section: bool(optimizers_of(section) & {*names}) or not optimizers_of(section) <= OWN
    )


_ROUNDS = Needs(
    'optimizer.state_dtype = "bfloat16" and AdamW',
    lambda section: section.state_dtype == "bfloat16" and "AdamW" in optimizers_of(section),
)
_FIXED = Needs(
    'the optimizer Muon and optimizer.orthogonalization = "newton_schulz"',
    lambda section: section.orthogonalization == "newton_schulz" and _uses("Muon").is_met(section),
)
_SHRINKS = Needs("weight decay", lambda section: any(each.weight_decay > 0 for each in (section, *section.groups)))
_DECOUPLES = Needs(
    "weight decay and AdamW, Muon or Lion",
    lambda section: _SHRINKS.is_met(section) and _uses("AdamW", "Muon", "Lion").is_met(section),
)
_SHRINKS_BY_STEP = Needs("optimizer.weight_decay_end", lambda section: section.weight_decay_end != -1)
_WARMS_UP = Needs("optimizer.momentum_start", lambda section: section.momentum_start != -1)


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and its hyper-parameters."""

    name: str = setting("AdamW", affects="facts")
    """Optimizer. Muon updates the matrices of blocks, but no routers; AdamW updates the other parameters."""
    lr: float = setting(3e-4, "3e-4 is a usual start", above=0)
    """Peak learning rate; [lr_schedule] scales it at each step."""
    beta1: float = setting(0.9, "0.9 is the usual value", least=0, below=1, needs=_uses("AdamW", "Lion"))
    """AdamW: decay of the first moment. Lion: share of the momentum in the update."""
    beta2: float = setting(0.95, "0.95 is the usual value", least=0, below=1, needs=_uses("AdamW", "Lion"))
    """AdamW: decay of the second moment. Lion: decay of the momentum; 0.99 is usual."""
    eps: float = setting(1e-8, "1e-8 is the usual value", above=0, needs=_uses("AdamW"))
    """AdamW: added to the denominator."""
    state_dtype: Literal["auto", "bfloat16"] = setting("auto", needs=_uses("AdamW"))
    """Dtype of AdamW's moments. auto: that of the parameters; bfloat16 takes half of the memory of float32."""
    state_rounding: Literal["stochastic", "nearest"] = setting("stochastic", needs=_ROUNDS)
    """How moments are rounded to bfloat16. stochastic: up or down at random, with the same random numbers on every
    mesh, so that small changes are kept on average; nearest: they are lost."""
    momentum: float = setting(-1.0, "0.95 is the usual value", least=0, below=1, unset=-1, needs=_uses("Muon", "SGD"))
    """Muon, SGD: decay of the momentum; -1: 0.95 for Muon, and 0, so no momentum, for SGD."""
    momentum_start: float = setting(
        -1.0, "0.85 is usual for Muon", least=0, below=1, unset=-1, needs=_uses("Muon", "SGD")
    )
    """Momentum before the first step, from which it comes to `momentum`; -1: it does not change."""
    momentum_steps: int | str = setting(300, "300 is usual for Muon", least=1, needs=_WARMS_UP)
    """Length of the way to `momentum`: a number of steps, or a text as in [lr_schedule]."""
    momentum_shape: str = setting("linear", needs=_WARMS_UP)
    """Shape of this way, as lr_schedule.decay."""
    orthogonalization: Literal["newton_schulz", "polar_express"] = setting("newton_schulz", needs=_uses("Muon"))
    """Muon: coefficients of the iterations. newton_schulz: the same in all, newton_schulz_coefficients; polar_express:
    others in each, the best ones for singular values from 0.001 to 1 (Amsel et al. 2025)."""
    newton_schulz_steps: int = setting(5, "5 is the usual number", least=1, needs=_uses("Muon"))
    """Muon: iterations of the orthogonalization."""
    newton_schulz_coefficients: tuple[float, ...] = setting((3.4445, -4.775, 2.0315), needs=_FIXED)
    """Muon: a, b, c of an iteration, a X + b (X X^T) X + c (X X^T)^2 X."""
    newton_schulz_dtype: Literal["auto", "float64", "float32", "bfloat16"] = setting("auto", needs=_uses("Muon"))
    """Muon: dtype of the orthogonalization, and of the matrices that ranks exchange for it. auto: bfloat16 if the model
    computes in it, as on GPUs by default, else that of the parameters, at least float32."""
    adjust_lr: Literal["match_rms_adamw", "original"] = setting("match_rms_adamw", needs=_uses("Muon"))
    """Muon: factor of the update of a matrix (m, n). match_rms_adamw: 0.2 sqrt(max(m, n)), the size of AdamW's updates,
    so that lr and weight_decay are AdamW's; original: sqrt(max(1, m / n))."""
    normuon_beta2: float = setting(-1.0, "0.95 is the usual value", least=0, below=1, unset=-1, needs=_uses("Muon"))
    """Muon: decay of the mean square of each row of updates, by whose root the rows are divided (NorMuon, Li et al.
    2025); -1: rows are not scaled."""
    weight_decay: float = setting(0.1, "0 switches weight decay off", least=0)
    """Decoupled weight decay (AdamW, Muon, Lion), or added to the gradient (SGD)."""
    cautious_weight_decay: bool = setting(False, needs=_DECOUPLES)
    """Whether weight decay leaves out the elements that the update moves away from 0 (Chen et al. 2025). Not of SGD."""
    weight_decay_end: float = setting(-1.0, "0 switches it off at the end", least=0, unset=-1, needs=_SHRINKS)
    """Weight decay at the last step; that of groups changes in proportion. -1: it does not change."""
    weight_decay_shape: str = setting("linear", needs=_SHRINKS_BY_STEP)
    """Shape of the way from weight_decay to weight_decay_end, as lr_schedule.decay."""
    weight_decay_skip: tuple[str, ...] = setting(("*norm*", "*bias*"), needs=_SHRINKS)
    """Parameters without weight decay: shell patterns, matched against the full parameter name. Parameters with fewer
    than two dimensions have none either, unless their group sets weight_decay or this list is empty."""
    qk_clip: float = setting(0.0, "0 for none; 100 is usual", least=0)
    """Largest attention score of a head: if it was higher in a step, the weights of its queries and keys are scaled
    after the update (Kimi K2's QK-clip); 0: none."""
    ema_decay: float = setting(0.0, "0 keeps no average; 0.999 is usual for 10,000 steps", least=0, below=1)
    """Decay per step of an average of the weights, which checkpoints have beside the weights; 0: no average."""
    groups: tuple[GroupConfig, ...] = ()
    """Groups of parameters with an optimizer or hyper-parameters of their own."""


SCHEDULED = ("weight_decay", "momentum")
"""Hyper-parameters of groups that may change by step, beside the learning rate."""
AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


def without_compiler(kind: type[AnyOptimizer]) -> type[AnyOptimizer]:
    """A subclass of a torch optimizer with the same methods, which do not import torch._dynamo.

    torch wraps them for programs that compile the optimizer. The wrappers import torch._dynamo at their first call,
    which takes 0.6 seconds of CPU time.
    """
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in ("add_param_group", "zero_grad")}
    return type(kind.__name__, (kind,), {**methods, "step": torch.no_grad()(inspect.unwrap(kind.step))})


@dataclass(frozen=True)
class Arguments:
    """What an optimizer is built from.

    bit_equal: whether the update of an element must not depend on where this rank's shard ends.
    groups: torch's parameter groups: pairs of name and parameter, lr_factor, eps, weight_decay, betas, momentum,
        cautious.
    shard_groups: the ranks that hold parts of the parameters. seed: of random numbers.
    """

    groups: list[dict[str, Any]]
    section: OptimizerConfig
    device: torch.device
    shard_groups: ShardGroups
    seed: int
    bit_equal: bool = False


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer, chosen by optimizer.name.

    options: of beta1, beta2 and momentum, those that it uses. takes_matrices: whether it updates only matrices, and
    stacks of them. momentum: for optimizer.momentum = -1.
    """

    build: Callable[[Arguments], torch.optim.Optimizer]
    options: tuple[str, ...]
    takes_matrices: bool = False
    momentum: float = 0.0


OPTIMIZERS: dict[str, OptimizerKind] = {}
"""The optimizers by name: those of titanlite/optim/registry.py, and those that plugins register."""


class SkippingOptimizer(torch.optim.Optimizer):
    """A torch optimizer that skips an update by itself.

    found_inf: a float scalar on the device, as for torch's fused optimizers; if it is not 0, `step` leaves weights and
    state unchanged, bit for bit.
    """

    found_inf: Tensor

    # without the wrappers that import torch._dynamo, see without_compiler
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

    @abstractmethod
    def zero_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first update: zeros."""

    def init_state(self) -> None:
        """Create the state that is missing."""
        for parameter, _ in self.each():
            if not self.state[parameter]:
                self.state[parameter].update(self.zero_state(parameter))

    def each(self) -> Iterable[tuple[Tensor, dict[str, Any]]]:
        """(parameter, group) of all parameters, in order."""
        for group in self.param_groups:
            yield from ((parameter, group) for parameter in group["params"])


def update_weights_(
    weights: Tensor, direction: Tensor, group: Mapping[str, Any], ok: Tensor, factor: float = 1
) -> None:
    """weights <- (1 - lr * weight_decay) * weights - lr * factor * direction if `ok`, in the dtype of `direction`.

    weights, direction: of the same shape; this rank's. group: see Arguments.groups, with its lr. If it is cautious,
    elements that have another sign than their direction do not decay (Chen et al., "Cautious Weight Decay", 2025).
    """
    before = weights.to(direction.dtype)
    updated = before * (1 - group["lr"] * group["weight_decay"])
    if group["cautious"] and group["weight_decay"]:
        updated = torch.where(direction.sign().mul_(before) >= 0, updated, before)
    updated.sub_(direction, alpha=group["lr"] * factor)
    weights.copy_(torch.where(ok, updated.to(weights.dtype), weights))


def skips_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer reads the attribute found_inf."""
    return isinstance(optimizer, SkippingOptimizer) or bool(optimizer.defaults.get("fused"))


class GatedOptimizer:
    """Torch optimizers with conditional updates that need no host read.

    optimizers: of disjoint parameters; their groups have the fields of Arguments.groups. `step_if(ok)` with a false
    `ok` leaves weights, moments and step counts unchanged, bit for bit.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self._full = [{key: group.get(key, 0.0) for key in SCHEDULED} for _, group in self.param_groups]
        self._has_all_state = False

    @property
    def param_groups(self) -> Iterable[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        """(optimizer, group) of all groups."""
        return ((optimizer, group) for optimizer in self.optimizers for group in optimizer.param_groups)

    def init_state(self) -> None:
        """Create missing state: moments and step counts of 0. May clear the gradients, unless all state exists."""
        if self._has_all_state:
            return
        for optimizer in self.optimizers:
            if isinstance(optimizer, SkippingOptimizer):
                optimizer.init_state()
            else:
                self._init_state_of(optimizer)
        self._has_all_state = True

    def _init_state_of(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        missing = [parameter for parameter in parameters if not optimizer.state[parameter]]
        if missing:  # always for SGD without momentum, which has no state
            for parameter in missing:
                parameter.grad = torch.zeros_like(parameter)
            self._step_if(optimizer, torch.zeros((), dtype=torch.bool, device=missing[0].device))
            optimizer.zero_grad(set_to_none=True)

    def named_state(self) -> Iterable[tuple[str, Tensor]]:
        """("<parameter>/<state>", tensor) of all existing state, in the order of the groups."""
        for optimizer, group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                for key, value in optimizer.state[parameter].items():
                    yield f"{name}/{key}", value

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def set_lr(self, lr: float, factors: Mapping[str, float] | None = None) -> None:
        """Set what changes by step. factors: of SCHEDULED; None: 1."""
        for (_, group), full in zip(self.param_groups, self._full, strict=True):
            group["lr"] = lr * group["lr_factor"]
            group.update({key: factor * full[key] for key, factor in (factors or {}).items()})

    def step_if(self, ok: Tensor) -> None:
        """Update if `ok`, a bool scalar on the device, the same on all ranks; otherwise change nothing."""
        for optimizer in self.optimizers:
            self._step_if(optimizer, ok)

    def _step_if(self, optimizer: torch.optim.Optimizer, ok: Tensor) -> None:
        if skips_by_itself(optimizer):
            optimizer.found_inf = (~ok).to(torch.float32)  # type: ignore[attr-defined]
            optimizer.step()
            return
        # Other optimizers cannot skip: update, then restore. This costs a copy of weights and moments.
        before = {key: tensor.clone() for key, tensor in _tensors(optimizer)}
        optimizer.step()
        for key, tensor in _tensors(optimizer):
            # State that this step created was zero before.
            tensor.copy_(torch.where(ok, tensor, before.get(key, tensor.new_zeros(()))))


def _tensors(optimizer: torch.optim.Optimizer) -> Iterable[tuple[tuple[int, str], Tensor]]:
    """Local shards of all tensors that a step changes: parameters with gradients, and their state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield (id(parameter), "parameter"), local_part(parameter)
                for name, value in optimizer.state[parameter].items():
                    if isinstance(value, Tensor):
                        yield (id(parameter), name), local_part(value)


class WeightAverage:
    """The exponential moving average of the weights: average <- decay * average + (1 - decay) * weights.

    Source: Polyak, Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992), with constant decay.

    parameters: by name. tensors: the averages, by name, placed as the parameters, in `average_dtype`; none if the decay
    is 0. They start at the present weights.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self._decay = decay
        self._parameters = parameters if decay else {}
        self.tensors = {
            name: torch.empty_like(parameter, dtype=average_dtype(parameter))
            for name, parameter in self._parameters.items()
        }
        self.restart()

    def restart(self) -> None:
        """Start at the present weights."""
        for average, weights in self._local():
            average.copy_(weights)

    def update_if(self, ok: Tensor) -> None:
        """Include the present weights if `ok`, a bool scalar on the device; otherwise change nothing, bit for bit."""
        for average, weights in self._local():
            updated = weights.to(average.dtype, copy=True)
            torch.lerp(average, updated, 1 - self._decay, out=updated)
            torch.where(ok, updated, average, out=average)

    def _local(self) -> Iterable[tuple[Tensor, Tensor]]:
        """This rank's shards of (average, weights)."""
        for name, parameter in self._parameters.items():
            yield local_part(self.tensors[name]), local_part(parameter)


NO_AVERAGE = WeightAverage({}, 0.0)


def average_dtype(parameter: Tensor) -> torch.dtype:
    """At least float32: an update changes the average by a fraction 1 - decay, which bfloat16 would round away."""
    return torch.promote_types(parameter.dtype, torch.float32)


def average_bytes(decay: float, shards: Iterable[Tensor]) -> tuple[int, int]:
    """Bytes of the averages of these shards, and temporary bytes of an update: of one average at a time."""
    sizes = [shard.numel() * average_dtype(shard).itemsize for shard in shards] if decay else []
    return sum(sizes), max(sizes, default=0)
