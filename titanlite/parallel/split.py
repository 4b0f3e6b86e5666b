"""The split of a model into pipeline stages of equal time."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise

from torch import nn

from titanlite.models.family import LanguageModel, Structure
from titanlite.parallel.mesh import ParallelismConfig
from titanlite.parallel.pipeline import logits_again, num_stages
from titanlite.parallel.recompute import ActivationCheckpointConfig, inside_compilation, recomputes


def assign_units(costs: Sequence[int], cuts: Sequence[int], stages: int, last: int = 1) -> list[range]:
    """The units of each stage, contiguous and at least one.

    cuts: index of the first unit of each stage except the first stage. If empty, minimizes the maximum stage cost, and
    among those splits the sum of squared stage costs. last: see Structure.
    """
    starts = [0, *cuts] if cuts else _balanced((*costs[:-last], sum(costs[-last:])), stages)
    return [range(start, end) for start, end in pairwise([*starts, len(costs)])]


@lru_cache(maxsize=256)  # a search splits the same model many times
def _balanced(costs: Sequence[int], stages: int) -> list[int]:
    """The first unit of each stage."""
    totals = [0, *accumulate(costs)]
    least, most = 0, totals[-1]  # the smallest maximum is between them
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if _fewest_stages(totals, middle) <= stages else (middle + 1, most)
    # of the units before `end`: (sum of the squared costs, first unit of each stage), infinite if there is no split
    best: list[tuple[float, list[int]]] = [(0, []), *[(math.inf, [])] * len(costs)]
    for _ in range(stages):
        longer: list[tuple[float, list[int]]] = []
        for end, total in enumerate(totals):
            found: tuple[float, list[int]] = (math.inf, [])
            for start in range(end - 1, bisect_left(totals, total - most) - 1, -1):
                value, starts = best[start]
                value += (total - totals[start]) ** 2
                if value <= found[0]:
                    found = min(found, (value, [*starts, start]))
            longer.append(found)
        best = longer
    return best[-1][1]


def _fewest_stages(totals: Sequence[int], most: int) -> float:
    """The fewest stages of a cost of at most `most` each. totals: cost of all units before each unit, and of all."""
    start = count = 0
    while start < len(totals) - 1:
        end = bisect_right(totals, totals[start] + most) - 1
        if end == start:
            return math.inf  # a unit costs more
        start, count = end, count + 1
    return count


def unit_weights(model: nn.Module, structure: Structure) -> list[int]:
    """Elements of the parameters of each unit that multiply tokens: all but embeddings and vectors, such as norms."""
    return [
        sum(
            parameter.numel()
            for name in unit
            for module in model.get_submodule(name).modules()
            if not isinstance(module, nn.Embedding)
            for parameter in module.parameters(recurse=False)
            if parameter.dim() > 1
        )
        for unit in structure.units
    ]


def unit_costs(
    weights: Sequence[int],
    structure: Structure,
    flops_per_token: int,
    section: ParallelismConfig,
    recompute: ActivationCheckpointConfig,
    of_blocks: Sequence[int] = (),
    *,
    bit_equal: bool = False,
) -> list[int]:
    """Time of each unit in a pipeline, as FLOPs for 3 tokens. An embedding takes no time.

    weights: from unit_weights. flops_per_token: of the model, without recomputation. of_blocks: the part of each block
    in it; empty: the blocks share by their weights what the other units leave.
    A recomputed block has a second forward pass. So may the head in each backward pass, and its softmax in float32
    takes about as long as another: 1.2 of it by the plan, on an H100 with a width of 4,096.
    """
    blocks = [structure.blocks.get(unit[0]) for unit in structure.units]
    apart = sum(weight for weight, block in zip(weights, blocks, strict=True) if block is None)
    in_blocks = max(sum(weights) - apart, 1)
    of_others = max(flops_per_token - sum(of_blocks), 6 * apart) if of_blocks else 6 * apart
    head_passes = 4 + logits_again(section, bit_equal=bit_equal)  # of a third of the 6 FLOPs of a weight each
    by_op = inside_compilation(recompute)  # which recomputes no matrix products
    return [
        head_passes * of_others * weight // max(apart, 1)
        if block is None
        else (3 + (recomputes(recompute, block) and not by_op))
        * (of_blocks[block] if of_blocks else max(flops_per_token - 6 * apart, 0) * weight // in_blocks)
        for weight, block in zip(weights, blocks, strict=True)
    ]


def split_stages(
    weights: Sequence[int],
    structure: Structure,
    flops_per_token: int,
    section: ParallelismConfig,
    recompute: ActivationCheckpointConfig,
    of_blocks: Sequence[int] = (),
    *,
    bit_equal: bool = False,
) -> list[range]:
    """The units of each stage of the full model: by pp_split, or balanced by time if it is empty. Arguments: as those
    of unit_costs."""
    names = [unit[0] for unit in structure.units]
    cuts = [names.index(name) for name in section.pp_split]
    costs = unit_costs(weights, structure, flops_per_token, section, recompute, of_blocks, bit_equal=bit_equal)
    return assign_units(costs, cuts, num_stages(section), structure.last)


def describe_stages(structure: Structure, stages: Sequence[range]) -> str:
    """First and last module of each stage, for the start log."""
    ends = [(structure.units[units[0]][0], structure.units[units[-1]][-1]) for units in stages]
    return " | ".join(first if first == last else f"{first} to {last}" for first, last in ends)


def merged_units(structure: Structure, stage: range) -> list[list[int]]:
    """The FSDP units of a stage, as indexes of the structure's units: those that share a parameter are one, at the
    place of the last of them."""
    merged = [[index] for index in stage]
    for first, others in structure.shared.items():
        both = [units for units in merged if any(_has(structure, units, name) for name in (first, *others))]
        if len(both) > 1:
            both[-1][:] = [index for units in both for index in units]
            merged = [units for units in merged if units not in both[:-1]]
    return merged


def _has(structure: Structure, units: Iterable[int], parameter: str) -> bool:
    """Whether one of these units of the structure has the parameter of this name."""
    return any(parameter.startswith(f"{name}.") for index in units for name in structure.units[index])


def holders(structure: Structure, stages: Sequence[range], owners: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """LanguageModel.holders of the full model. stages: their units. owners: rank on the pp axis of each stage."""
    found = {}
    for first, others in structure.shared.items():
        having = [any(_has(structure, units, name) for name in (first, *others)) for units in stages]
        found[first] = tuple(dict.fromkeys(owner for owner, has in zip(owners, having, strict=True) if has))
    return found


def stage_structure(structure: Structure, stage: range) -> Structure:
    """The structure of a stage, with its FSDP units."""
    units = tuple(
        tuple(name for index in units for name in structure.units[index]) for units in merged_units(structure, stage)
    )
    names = {name for unit in units for name in unit}
    return replace(
        structure, units=units, blocks={name: index for name, index in structure.blocks.items() if name in names}
    )


def keep_units_(
    model: LanguageModel, structure: Structure, stages: Sequence[range], stage: int, owners: Sequence[int]
) -> None:
    """Remove all units but those of a stage from the model, in place. Arguments: as those of holders."""
    for index, unit in enumerate(structure.units):
        for name in unit if index not in stages[stage] else ():
            parent, _, leaf = name.rpartition(".")
            owner = model.get_submodule(parent)
            if isinstance(owner, nn.ModuleDict):
                del owner[leaf]
            else:
                setattr(owner, leaf, None)
    for first, others in structure.shared.items():
        names = [name for name in (first, *others) if _has(structure, stages[stage], name)]
        if names and names[0] != first:
            model.first_names = {**model.first_names, names[0]: first}
        if names:
            model.holders = {**model.holders, first: holders(structure, stages, owners)[first]}
