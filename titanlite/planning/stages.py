"""The part of the model that each rank holds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor

from titanlite.config.schema import JobConfig
from titanlite.models.decoder import flops_of_blocks
from titanlite.models.experts import Experts
from titanlite.models.family import FAMILIES, ModelConfig, Structure, resolve_model
from titanlite.models.registry import meta_model, structure_of
from titanlite.optim.groups import divide, names_of_muon
from titanlite.optim.muon import flops
from titanlite.optim.optimizer import OptimizerConfig
from titanlite.optim.registry import memory_bytes
from titanlite.parallel.data import is_wrapped, sharded_dimension
from titanlite.parallel.exact import padded_rows
from titanlite.parallel.expert import FEATURES
from titanlite.parallel.mesh import ParallelismConfig, PipelineSchedule
from titanlite.parallel.pipeline import num_stages, stage_owners
from titanlite.parallel.recompute import ActivationCheckpointConfig
from titanlite.parallel.split import assign_units, holders, merged_units, split_stages, unit_weights
from titanlite.parallel.tensor import tensor_dimension
from titanlite.planning.activations import Features, features_of


@dataclass(frozen=True)
class FSDPUnit:
    """One FSDP unit on one rank.

    block: index of the transformer block in the full model; None if the unit is no block.
    elements: of its parameters when gathered over dp_shard, including padding. experts: of those that are gathered
    separately, over expert_shard. replicated_over_tp: elements of each parameter that is replicated over tp.
    """

    block: int | None
    elements: int
    experts: int
    replicated_over_tp: tuple[int, ...]


@dataclass(frozen=True)
class Matrices:
    """Equal parameters that Muon updates: matrices, or stacks of them.

    small, large: dimensions of a matrix. parameters: how many. count: matrices of each. own: how many of them this rank
    has a part of, the first ones on coordinate 0. part: elements of this part. copies: ranks that have the same part.
    """

    small: int
    large: int
    parameters: int
    count: int
    own: int
    part: int
    copies: int

    @property
    def elements(self) -> int:
        """Of a matrix."""
        return self.small * self.large

    @property
    def flops(self) -> int:
        """Of an iteration of the orthogonalization of a matrix."""
        return flops(self.small, self.large, 1)


@dataclass(frozen=True)
class Stage:
    """A pipeline stage on one rank.

    num_parameters: of the full stage; one that stages share counts in the first of them. The fields ..._bytes count
    this rank's share; stages of a rank have one copy of what they share, which counts in the first of them.
    parameter_bytes: of the parameters; the reduced gradients take as many, since they have the same dtype and sharding.
    update_bytes: temporary bytes of the update, without that of `matrices`, which Muon updates. rows: see padded_rows.
    blocks: indexes of the stage's transformer blocks in the full model. wrapped: whether FSDP or replicate wraps it.
    shared: bytes of each gradient of a parameter of which other ranks have copies, and the number of these ranks.
    """

    index: int
    is_last: bool
    num_parameters: int
    parameter_bytes: int
    optimizer_bytes: int
    update_bytes: int
    buffer_bytes: int
    units: tuple[FSDPUnit, ...]
    matrices: tuple[Matrices, ...]
    rows: int
    blocks: tuple[int, ...]
    wrapped: bool
    shared: tuple[tuple[int, int], ...]

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of the parameters of each unit when gathered."""
        return [unit.elements + unit.experts for unit in self.units]

    @cached_property
    def reduced(self) -> list[int]:
        """Elements of each gradient that is reduced in a call of its own, if units are not reduced at once."""
        return [size for unit in self.units for size in (unit.elements, unit.experts) if size]


@dataclass(frozen=True)
class _Shape:
    """A parameter of the full model. tp: the dimension that tp shards; None: replicated over tp."""

    name: str
    shape: tuple[int, ...]
    tp: int | None
    is_expert: bool

    def part(self, tp: int, ep: int) -> tuple[int, ...]:
        """The shape on coordinate 0 of tp and ep."""
        sizes = list(self.shape)
        if self.tp is not None:
            sizes[self.tp] = -(-sizes[self.tp] // tp)
        if self.is_expert:
            sizes[0] //= ep
        return tuple(sizes)


@dataclass(frozen=True, eq=False)  # one for each model, compared by identity
class Blueprint:
    """The parameters of a full model with these hyper-parameters, by unit.

    names: first module of each unit. blocks: index of the transformer block of each unit, or None. weights: of
    unit_weights. buffers, block_buffers: elements of the model's own buffers, and of each block's.
    """

    hyper_parameters: Any
    names: tuple[str, ...]
    units: tuple[tuple[_Shape, ...], ...]
    blocks: tuple[int | None, ...]
    buffers: int
    block_buffers: int
    structure: Structure
    features: Features
    weights: tuple[int, ...]

    @cached_property
    def costs(self) -> list[int]:
        """Elements of the parameters of each unit."""
        return [sum(math.prod(parameter.shape) for parameter in unit) for unit in self.units]


def blueprint(config: ModelConfig) -> Blueprint:
    """The blueprint of a model all of whose modules have a form over tp."""
    return _blueprint(config.family, resolve_model(config)[1])


@cache
def _blueprint(family_name: str, hyper_parameters: Any) -> Blueprint:
    model = meta_model(family_name, hyper_parameters)
    structure = structure_of(FAMILIES[family_name], hyper_parameters, model)
    first_names = {name: first for first, others in structure.shared.items() for name in others}
    units = []
    for names in structure.units:
        found: dict[Tensor, _Shape] = {}  # parameters tied in a unit count once
        for prefix, module in chain(*(model.get_submodule(name).named_modules(prefix=name) for name in names)):
            for name, parameter in module.named_parameters(recurse=False):
                is_expert = isinstance(module, Experts)
                tp = FEATURES[name] if is_expert else tensor_dimension(module, name)
                full_name = first_names.get(f"{prefix}.{name}", f"{prefix}.{name}")
                found.setdefault(parameter, _Shape(full_name, tuple(parameter.shape), tp, is_expert))
        units.append(tuple(found.values()))
    blocks = tuple(structure.blocks.get(names[0]) for names in structure.units)
    of_blocks = sum(buffer.numel() for name in structure.blocks for buffer in model.get_submodule(name).buffers())
    buffers = sum(buffer.numel() for buffer in model.buffers())
    names = tuple(unit[0] for unit in structure.units)
    weights = tuple(unit_weights(model, structure))
    block_buffers = of_blocks // max(len(structure.blocks), 1)
    own = buffers - of_blocks
    features = features_of(model, structure)
    return Blueprint(hyper_parameters, names, tuple(units), blocks, own, block_buffers, structure, features, weights)


def plan_stages(config: JobConfig, sizes: Mapping[str, int]) -> list[Stage]:
    """All pipeline stages, as coordinate 0 of the data and tp axes holds them, which has the largest shards.

    sizes: degrees of the mesh axes. tests/distributed/test_plan_bytes.py compares them with the parts of running ranks.
    """
    section, dtypes = config.parallelism, config.training.dtypes
    shards, tp = sizes["dp_shard"] * sizes["cp"], sizes["tp"]
    wrapped = is_wrapped(shards * sizes["dp_replicate"] * tp, section.pp, dtypes)
    model = blueprint(config.model)
    split = _split(
        *(model, config.model.family, config.training.seq_len),
        *(section.pp, section.pp_schedule, tuple(section.pp_split), config.activation_checkpoint),
        config.training.bit_equal,
    )
    owners = tuple(stage_owners(section))
    return list(
        _stages(model, config.optimizer, dtypes.parameters, split, owners, shards, tp, section.ep, wrapped=wrapped)
    )


def split_by_parameters(config: JobConfig) -> tuple[str, ...]:
    """parallelism.pp_split with the fewest parameters on the largest stage."""
    model, section = blueprint(config.model), config.parallelism
    _, *stages = assign_units(model.costs, [], num_stages(section), model.structure.last)
    return tuple(model.names[stage.start] for stage in stages)


@cache
def _split(
    model: Blueprint,
    family: str,
    seq_len: int,
    pp: int,
    schedule: PipelineSchedule,
    cuts: tuple[str, ...],
    recompute: ActivationCheckpointConfig,
    bit_equal: bool,
) -> tuple[range, ...]:
    """The units of each stage."""
    section = ParallelismConfig(pp=pp, pp_schedule=schedule, pp_split=cuts)
    flops = FAMILIES[family].flops_per_token(model.hyper_parameters, seq_len)
    of_blocks = block_flops(model, seq_len)
    return tuple(
        split_stages(model.weights, model.structure, flops, section, recompute, of_blocks, bit_equal=bit_equal)
    )


@lru_cache(maxsize=256)
def block_flops(model: Blueprint, seq_len: int) -> tuple[int, ...]:
    """The part of each block in flops_per_token."""
    return tuple(flops_of_blocks(model.hyper_parameters, seq_len))


@lru_cache(maxsize=1024)  # a search plans the same stages many times
def _stages(
    model: Blueprint,
    optimizer: OptimizerConfig,
    stored: torch.dtype,
    split: tuple[range, ...],
    owners: tuple[int, ...],
    shards: int,
    tp: int,
    ep: int,
    *,
    wrapped: bool,
) -> tuple[Stage, ...]:
    """split: the units of each stage. owners: see stage_owners. shards: ranks that share a parameter."""
    copies = holders(model.structure, split, owners)
    found: set[str | tuple[int, str]] = set()  # parameters of earlier stages, and with the rank that has them
    wide = torch.promote_types(stored, torch.float32).itemsize  # the dtype that init_buffers uses
    kinds, made = _kinds(model, optimizer), dict[tuple[int, ...], Stage]()
    stages: list[Stage] = []
    for index, own in enumerate(split):
        blocks = tuple(block for unit in own if (block := model.blocks[unit]) is not None)
        is_last = index == len(split) - 1
        alike = (is_last, *((index,) if model.structure.shared else (kinds[unit] for unit in own)))
        if (same := made.get(alike)) is not None:  # it differs only in its place
            placed = (replace(each, block=model.blocks[unit]) for each, unit in zip(same.units, own, strict=True))
            stages.append(replace(same, index=index, units=tuple(placed), blocks=blocks))
            continue
        units, parts = [], dict[str, Tensor]()
        shapes = {parameter.name: parameter for unit in own for parameter in model.units[unit]}
        numel = 0
        for merged in merged_units(model.structure, own):
            elements = experts = 0
            parameters = {parameter.name: parameter for unit in merged for parameter in model.units[unit]}.values()
            for parameter in parameters:
                is_apart = parameter.is_expert and ep > 1
                part, ranks = list(parameter.part(tp, ep)), shards // ep if is_apart else shards
                dimension = sharded_dimension(part, ranks)
                part[dimension] = -(-part[dimension] // ranks)
                numel += math.prod(parameter.shape) if parameter.name not in found else 0
                if (owners[index], parameter.name) not in found:
                    parts[parameter.name] = torch.empty(part, dtype=stored, device="meta")
                found |= {parameter.name, (owners[index], parameter.name)}
                gathered = math.prod(part) * ranks  # all other ranks pad their shards to the size of the first one
                elements, experts = (elements, experts + gathered) if is_apart else (elements + gathered, experts)
            replicated = [math.prod(parameter.part(tp, ep)) for parameter in parameters if parameter.tp is None]
            units.append(FSDPUnit(model.blocks[merged[-1]], elements, experts, tuple(replicated) if tp > 1 else ()))
        groups = divide(optimizer, parts, model.structure)
        stages.append(
            Stage(
                index,
                is_last,
                numel,
                sum(part.numel() * part.element_size() for part in parts.values()),
                *memory_bytes(optimizer, groups),
                (model.buffers + len(blocks) * model.block_buffers) * wide,
                tuple(units),
                _matrices(
                    (shapes[name].shape, parts[name].shape, tp if shapes[name].tp is None else 1)
                    for name in names_of_muon(groups)
                ),
                sum(padded_rows(parameter.shape) for parameter in shapes.values()),
                blocks,
                wrapped,
                tuple(
                    (parts[name].numel() * stored.itemsize, len(ranks) - 1)
                    for name, ranks in copies.items()
                    if name in parts and len(ranks) > 1
                ),
            )
        )
        made[alike] = stages[-1]
    return tuple(stages)


@cache
def _kinds(model: Blueprint, optimizer: OptimizerConfig) -> tuple[int, ...]:
    """For each unit the first one that has as many parameters of the same shapes, in the same groups."""
    named = {each.name: torch.empty(each.shape, device="meta") for unit in model.units for each in unit}
    groups = {
        name: index
        for index, group in enumerate(divide(optimizer, named, model.structure))
        for name in group.parameters
    }
    first: dict[Any, int] = {}
    return tuple(
        first.setdefault((block is None, *((groups[each.name], replace(each, name="")) for each in unit)), index)
        for index, (unit, block) in enumerate(zip(model.units, model.blocks, strict=True))
    )


def _matrices(parameters: Iterable[tuple[Sequence[int], Sequence[int], int]]) -> tuple[Matrices, ...]:
    """In the order in which they are dealt out. parameters: shape, this rank's part of it, copies of the part."""
    found = []
    for shape, part, copies in parameters:
        (*stack, rows, columns), (*own, own_rows, own_columns) = shape, part
        small, large = sorted((rows, columns))
        found.append(Matrices(small, large, 1, math.prod(stack), math.prod(own), own_rows * own_columns, copies))
    found.sort(key=lambda each: -each.flops)  # stable, as in `deal`
    return tuple(replace(each, parameters=len(list(equal))) for each, equal in groupby(found))
