"""Table of the optimizers, their construction, and their memory."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from titanlite.optim.adamw import ADAMW
from titanlite.optim.optimizer import GatedOptimizer, OptimizerConfig, OptimizerKind
from titanlite.optim.sgd import SGD
from titanlite.runtime.errors import Problem, check_ranges, require

OPTIMIZERS: dict[str, OptimizerKind] = {
    "AdamW": ADAMW,
    "SGD": SGD,
}


def check_optimizer(section: OptimizerConfig) -> list[Problem]:
    """Check the ranges of [optimizer], and that torch has the implementation."""
    return [
        *check_ranges(section, "optimizer"),
        *require(
            section.implementation != "fused" or OPTIMIZERS[section.name].has_fused,
            "optimizer.implementation",
            section.implementation,
            f'not "fused": torch has no fused {section.name} for sharded parameters',
            'use "auto" or "foreach", or optimizer.name = "AdamW"',
        ),
    ]


def resolve_implementation(section: OptimizerConfig) -> str:
    """The implementation, with "auto" resolved to fused if supported, else foreach."""
    auto = "fused" if OPTIMIZERS[section.name].has_fused else "foreach"
    return auto if section.implementation == "auto" else section.implementation


def build_optimizer(section: OptimizerConfig, model_parts: Iterable[nn.Module], device: torch.device) -> GatedOptimizer:
    """Build the optimizer of all parameters of `model_parts`, in two groups: with and without weight decay."""
    named = {name: parameter for part in model_parts for name, parameter in part.named_parameters()}
    skipped = {name for name in named if any(fnmatchcase(name, pattern) for pattern in section.weight_decay_skip)}
    groups = [
        {"params": [(n, p) for n, p in named.items() if n not in skipped], "weight_decay": section.weight_decay},
        {"params": [(n, p) for n, p in named.items() if n in skipped], "weight_decay": 0.0},
    ]
    kind, implementation = OPTIMIZERS[section.name], resolve_implementation(section)
    optimizer = kind.build([group for group in groups if group["params"]], section, implementation, device)
    return GatedOptimizer(optimizer, gated_by_kernel=implementation == "fused")


def state_bytes(section: OptimizerConfig, parameters: Iterable[Tensor]) -> int:
    """Bytes of optimizer state after a step, for this rank's shards of the parameters. Allocates nothing of their size.

    The step count of each tensor is on the device (fused, or any implementation on an accelerator) or on the host.
    """
    # A step on a small parameter of each dtype. One on the meta device would import torch._dynamo: half a second.
    parameters = list(parameters)
    samples = {dtype: nn.Parameter(torch.zeros(2, 3, dtype=dtype)) for dtype in {p.dtype for p in parameters}}
    for sample in samples.values():
        sample.grad = torch.zeros_like(sample)
    optimizer = OPTIMIZERS[section.name].build(
        [{"params": list(samples.values())}], section, "for-loop", torch.device("cpu")
    )
    optimizer.step()
    states = {dtype: optimizer.state.get(sample, {}).values() for dtype, sample in samples.items()}
    total = 0
    for parameter in parameters:
        for value in (value for value in states[parameter.dtype] if isinstance(value, Tensor)):
            assert value.shape in ((), (2, 3)), "state must be of the parameter's shape, or a scalar"
            total += value.itemsize * (parameter.numel() if value.dim() else 1)
    return total


def update_bytes(section: OptimizerConfig, parameter_bytes: int, optimizer_bytes: int) -> int:
    """Temporary bytes of an update: a copy of parameters and state, unless the kernel can skip updates."""
    return 0 if resolve_implementation(section) == "fused" else parameter_bytes + optimizer_bytes
