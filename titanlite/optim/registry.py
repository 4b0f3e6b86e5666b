"""Table of the optimizers, their construction, and their memory."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.models.family import Structure
from titanlite.optim.elementwise import ADAMW, LION, SGD
from titanlite.optim.groups import Group, check_groups, divide
from titanlite.optim.muon import MUON
from titanlite.optim.optimizer import OPTIMIZERS as OPTIMIZERS
from titanlite.optim.optimizer import (
    Arguments,
    GatedOptimizer,
    OptimizerConfig,
    SkippingOptimizer,
    average_bytes,
    skips_by_itself,
)
from titanlite.optim.rounding import rounding_bytes
from titanlite.parallel.mesh import ShardGroups
from titanlite.runtime.errors import Problem, Rules

OPTIMIZERS.update({"AdamW": ADAMW, "Muon": MUON, "Lion": LION, "SGD": SGD})
CPU = torch.device("cpu")
WIDE_TENSORS = {"AdamW": 6, "Lion": 4}
"""Tensors of the size of a parameter, in float32 at least, that an update by a SkippingOptimizer holds at once."""
MAX_BETA2_NEAREST = 0.99
"""With moments rounded to the nearest bfloat16, which has 8 bits, a second moment that falls by less than 1 / 2^8 of
itself in a step does not fall at all."""


def check_optimizer(section: OptimizerConfig) -> list[Problem]:
    """Problems of [optimizer] that do not depend on the parameters."""
    rules = Rules("optimizer", section)
    names = sorted({section.name, *(group.optimizer for group in section.groups)} - {"auto"})
    has_momentum = section.momentum == -1 or any("momentum" in OPTIMIZERS[name].options for name in names)
    rules.needs("momentum", has_momentum, f"Muon or SGD, not with {' and '.join(names)}")
    three = len(section.newton_schulz_coefficients) == 3
    rules.require("newton_schulz_coefficients", three, "three numbers", "leave it out for the default")
    return rules.problems


def check_parameters(
    section: OptimizerConfig, named: Mapping[str, Tensor], structure: Structure, dtype: torch.dtype
) -> list[Problem]:
    """Problems of groups, and of moments in bfloat16. named, structure: of the full model. dtype: of the parameters."""
    rules = Rules("optimizer", section, check_groups(section, named, structure))
    small = section.state_dtype == "bfloat16"
    if rules.problems or not (small or dtype == torch.bfloat16):
        return rules.problems
    adamw = [group for group in divide(section, named, structure) if group.optimizer == "AdamW"]
    rules.needs("state_dtype", adamw or not small, "AdamW, whose moments it is about")
    largest = max((group.options["betas"][1] for group in adamw), default=0.0)
    limit = f"{MAX_BETA2_NEAREST}: a second moment that falls by less than 1/256 in a step is rounded back, never falls"
    if largest > MAX_BETA2_NEAREST and not small:
        rule = f'with training.dtype = "bfloat16", in which AdamW has its moments, too, at most {limit}'
        remedy = 'set optimizer.state_dtype = "bfloat16", which rounds them stochastically, or a smaller beta2'
        rules.problems.append(Problem("optimizer.beta2", largest, rule, remedy))
    nearest = small and section.state_rounding != "stochastic" and largest > MAX_BETA2_NEAREST
    rule, remedy = f"stochastic with beta2 = {largest:g}, above {limit}", "leave it out, or set a smaller beta2"
    rules.require("state_rounding", not nearest, rule, remedy)
    return rules.problems


def build_optimizer(
    section: OptimizerConfig,
    named: Mapping[str, nn.Parameter],
    structure: Structure,
    device: torch.device,
    shard_groups: ShardGroups,
    seed: int,
    *,
    bit_equal: bool = False,
) -> GatedOptimizer:
    """Build the optimizers of these parameters, by name.

    structure: of the full model. shard_groups: the ranks that hold parts of the parameters. seed: of random numbers.
    bit_equal: see Arguments.
    """
    groups = divide(section, named, structure)
    return GatedOptimizer(_optimizers(section, groups, device, shard_groups, seed, bit_equal=bit_equal))


def _optimizers(
    section: OptimizerConfig,
    groups: Sequence[Group],
    device: torch.device,
    shard_groups: ShardGroups,
    seed: int,
    *,
    bit_equal: bool = False,
) -> list[torch.optim.Optimizer]:
    by_name: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        by_name.setdefault(group.optimizer, []).append({"params": list(group.parameters.items()), **group.options})
    return [
        OPTIMIZERS[name].build(Arguments(torchs, section, device, shard_groups, seed, bit_equal))
        for name, torchs in by_name.items()
    ]


def memory_bytes(section: OptimizerConfig, groups: Sequence[Group]) -> tuple[int, int]:
    """(bytes of the state after a step, temporary bytes of an update), with those of the average of the weights.
    Allocates nothing of their size.

    groups: of this rank's parts. Temporary: a copy of weights and state of optimizers that cannot skip an update, and
    a tensor of the size of each parameter, as of SGD's foreach form; for the others, tensors of the size of one
    parameter. Those of Muon depend on the mesh: titanlite/planning/owner_rounds.py.
    """
    state, update = average_bytes(section.ema_decay, [part for group in groups for part in group.parameters.values()])
    for group in groups:
        parts, options = group.parameters.values(), tuple(group.options.items())
        samples = {part.dtype: _sample(section, group.optimizer, options, part.dtype) for part in parts}
        own = 0
        for part in parts:
            of_element, of_row, fixed, _ = samples[part.dtype]
            own += of_element * part.numel() + of_row * prod(part.shape[:-1]) + fixed
        state += own
        *_, optimizer = next(iter(samples.values()))
        if not skips_by_itself(optimizer):
            update += own + 2 * sum(part.numel() * part.itemsize for part in parts)
        elif isinstance(optimizer, SkippingOptimizer) and group.optimizer in WIDE_TENSORS:
            largest = max(part.numel() for part in parts)
            wide = torch.promote_types(next(iter(samples)), torch.float32).itemsize
            small = group.optimizer == "AdamW" and section.state_dtype == "bfloat16"
            rounds = small and section.state_rounding == "stochastic"
            temporary = WIDE_TENSORS[group.optimizer] * largest * wide + (rounding_bytes(largest) if rounds else 0)
            update = max(update, temporary)
    return state, update


@lru_cache(maxsize=256)  # a search asks for the same for each stage
def _sample(
    section: OptimizerConfig, name: str, options: tuple[tuple[str, Any], ...], dtype: torch.dtype
) -> tuple[int, int, int, torch.optim.Optimizer]:
    """(bytes of the state of an element, of a row, of the other state of a parameter, the optimizer), by a step on a
    small parameter. One on the meta device would import torch._dynamo: half a second."""
    sample = nn.Parameter(torch.zeros(2, 3, dtype=dtype))
    group = Group("-", name, dict(options), {"sample": sample})
    (optimizer,) = _optimizers(section, [group], CPU, ShardGroups(), 0)
    GatedOptimizer([optimizer]).init_state()
    values = list(optimizer.state.get(sample, {}).values())
    shapes = ((2, 3), (2, 1), ())
    assert all(value.shape in shapes for value in values), "state must be of its parameter's shape, rows, or a scalar"
    of_element, of_row, fixed = (sum(value.itemsize for value in values if value.shape == shape) for shape in shapes)
    return of_element, of_row, fixed, optimizer
