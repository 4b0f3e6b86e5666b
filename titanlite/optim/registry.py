"""Table of the optimizers, their construction, and their memory."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.models.family import Plan
from titanlite.optim.adamw import ADAMW
from titanlite.optim.groups import divide
from titanlite.optim.muon import MUON
from titanlite.optim.optimizer import GatedOptimizer, OptimizerConfig, OptimizerKind
from titanlite.optim.sgd import SGD
from titanlite.parallel.mesh import Sharing
from titanlite.runtime.errors import Problem, check_ranges, require

OPTIMIZERS: dict[str, OptimizerKind] = {
    "AdamW": ADAMW,
    "SGD": SGD,
    "Muon": MUON,
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
        *require(
            len(section.newton_schulz_coefficients) == 3,
            "optimizer.newton_schulz_coefficients",
            section.newton_schulz_coefficients,
            "three numbers",
            "leave it out for the default",
        ),
    ]


def resolve_implementation(section: OptimizerConfig, name: str) -> str:
    """The implementation of an optimizer, with "auto" resolved to fused if supported, else foreach."""
    auto = "fused" if OPTIMIZERS[name].has_fused else "foreach"
    return auto if section.implementation == "auto" else section.implementation


def build_optimizer(
    section: OptimizerConfig, named: Mapping[str, nn.Parameter], plan: Plan, device: torch.device, sharing: Sharing
) -> GatedOptimizer:
    """Build the optimizers of these parameters, by name. plan: of the full model. sharing: the ranks that hold parts of
    the parameters."""
    by_optimizer: dict[str, list[dict[str, Any]]] = {}
    for group in divide(section, named, plan):
        entry = {"params": list(group.parameters.items()), "weight_decay": group.weight_decay}
        by_optimizer.setdefault(group.optimizer, []).append(entry)
    optimizers, can_skip = [], []
    for name, groups in by_optimizer.items():
        kind, implementation = OPTIMIZERS[name], resolve_implementation(section, name)
        optimizers.append(kind.build(groups, section, implementation, device, sharing))
        can_skip.append(kind.always_skips or implementation == "fused")
    return GatedOptimizer(optimizers, can_skip)


def state_bytes(section: OptimizerConfig, parameters: Mapping[str, Tensor], plan: Plan) -> int:
    """Bytes of optimizer state after a step, for this rank's shards of the parameters. Allocates nothing of their size.

    The step count of each tensor is on the device (fused, or any implementation on an accelerator) or on the host.
    """
    total = 0
    for group in divide(section, parameters, plan):
        # A step on a small parameter of each dtype. One on the meta device would import torch._dynamo: half a second.
        samples = {
            dtype: nn.Parameter(torch.zeros(2, 3, dtype=dtype))
            for dtype in {p.dtype for p in group.parameters.values()}
        }
        for sample in samples.values():
            sample.grad = torch.zeros_like(sample)
        groups = [{"params": list(samples.values())}]
        optimizer = OPTIMIZERS[group.optimizer].build(groups, section, "for-loop", torch.device("cpu"), Sharing())
        optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        optimizer.step()
        states = {dtype: optimizer.state.get(sample, {}).values() for dtype, sample in samples.items()}
        for parameter in group.parameters.values():
            for value in (value for value in states[parameter.dtype] if isinstance(value, Tensor)):
                assert value.shape in ((), (2, 3)), "state must be of the parameter's shape, or a scalar"
                total += value.itemsize * (parameter.numel() if value.dim() else 1)
    return total


def update_bytes(section: OptimizerConfig, parameter_bytes: int, optimizer_bytes: int) -> int:
    """Temporary bytes of an update: a copy of parameters and state, unless the kernel can skip updates. Muon: the
    directions before and after orthogonalization, and messages."""
    if OPTIMIZERS[section.name].always_skips:
        return 3 * parameter_bytes
    return 0 if resolve_implementation(section, section.name) == "fused" else parameter_bytes + optimizer_bytes
