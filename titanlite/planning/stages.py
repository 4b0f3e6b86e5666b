"""The part of the model that each rank holds: computed for a plan, or measured on the parts of a run."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor

from titanlite.config.schema import JobConfig
from titanlite.models.experts import Experts
from titanlite.models.family import FAMILIES, LanguageModel, ModelConfig, Structure, resolve_model
from titanlite.optim.groups import names_of_muon
from titanlite.optim.muon import flops
from titanlite.optim.optimizer import OptimizerConfig
from titanlite.optim.registry import memory_bytes
from titanlite.parallel.data import is_wrapped, sharded_dimension, wrapped_modules
from titanlite.parallel.expert import FEATURES
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.pipeline import ModelPart, assign_units, num_stages
from titanlite.parallel.tensor import tensor_dimension
from titanlite.precision import DTYPES
from titanlite.runtime.dtensors import is_dtensor, local_part


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

    @property
    def size(self) -> int:
        """Elements of all parameters when gathered."""
        return self.elements + self.experts


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

    num_parameters: of the full stage, tied parameters counted once. The fields ..._bytes count this rank's share.
    parameter_bytes: of the parameters; the reduced gradients take as many, since they have the same dtype and sharding.
    update_bytes: temporary bytes of the update, without that of `matrices`, which Muon updates.
    blocks: indexes of the stage's transformer blocks in the full model. wrapped: whether FSDP or replicate wraps it.
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
    blocks: tuple[int, ...]
    wrapped: bool


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
    """The parameters of a full model by unit. names: first module of each unit. blocks: index of the transformer block
    of each unit, or None. buffers, block_buffers: elements of the model's own buffers, and of each block's.
    """

    names: tuple[str, ...]
    units: tuple[tuple[_Shape, ...], ...]
    blocks: tuple[int | None, ...]
    buffers: int
    block_buffers: int
    structure: Structure

    @cached_property
    def costs(self) -> list[int]:
        """Elements of the parameters of each unit."""
        return [sum(math.prod(parameter.shape) for parameter in unit) for unit in self.units]


def blueprint(config: ModelConfig) -> Blueprint:
    """The blueprint of a model with a tensor style for all its parameters, as decoders have."""
    return _blueprint(config.family, resolve_model(config)[1])


@cache
def _blueprint(family_name: str, hyper_parameters: Any) -> Blueprint:
    family = FAMILIES[family_name]
    with torch.device("meta"):
        model = family.build(hyper_parameters)
    model.tie_weights()
    structure = family.structure(hyper_parameters)
    units = []
    for names in structure.units:
        found: dict[Tensor, _Shape] = {}  # tied parameters count once
        for prefix, module in chain(*(model.get_submodule(name).named_modules(prefix=name) for name in names)):
            for name, parameter in module.named_parameters(recurse=False):
                is_expert = isinstance(module, Experts)
                tp = FEATURES[name] if is_expert else tensor_dimension(structure, prefix, name)
                found.setdefault(parameter, _Shape(f"{prefix}.{name}", tuple(parameter.shape), tp, is_expert))
        units.append(tuple(found.values()))
    blocks = tuple(structure.blocks.get(names[0]) for names in structure.units)
    of_blocks = sum(buffer.numel() for name in structure.blocks for buffer in model.get_submodule(name).buffers())
    buffers = sum(buffer.numel() for buffer in model.buffers())
    names = tuple(unit[0] for unit in structure.units)
    block_buffers = of_blocks // max(len(structure.blocks), 1)
    return Blueprint(names, tuple(units), blocks, buffers - of_blocks, block_buffers, structure)


def plan_stages(config: JobConfig, sizes: Mapping[str, int]) -> list[Stage]:
    """All pipeline stages, as coordinate 0 of the data and tp axes holds them, which has the largest shards.

    sizes: degrees of the mesh axes. tests/distributed/test_plan_bytes.py compares them with the parts of running ranks.
    """
    section, dtypes = config.parallelism, config.training.dtypes
    shards, tp = sizes["dp_shard"] * sizes["cp"], sizes["tp"]
    wrapped = is_wrapped(shards * sizes["dp_replicate"] * tp, section.pp, dtypes)
    split = tuple(section.pp_split), num_stages(section)
    return list(
        _stages(
            blueprint(config.model), config.optimizer, dtypes.parameters, split, shards, tp, section.ep, wrapped=wrapped
        )
    )


@cache
def _split(model: Blueprint, cuts: tuple[str, ...], stages: int) -> list[range]:
    """The units of each stage."""
    return assign_units(model.costs, [model.names.index(name) for name in cuts], stages)


@lru_cache(maxsize=1024)  # a search plans the same stages many times
def _stages(
    model: Blueprint,
    optimizer: OptimizerConfig,
    stored: torch.dtype,
    stage_split: tuple[tuple[str, ...], int],
    shards: int,
    tp: int,
    ep: int,
    *,
    wrapped: bool,
) -> tuple[Stage, ...]:
    """stage_split: parallelism.pp_split, and the number of stages. shards: ranks that share a parameter."""
    split = _split(model, *stage_split)
    wide = torch.promote_types(stored, torch.float32).itemsize  # the dtype that init_buffers uses
    stages = []
    for index, own in enumerate(split):
        units, parts = [], dict[str, Tensor]()
        shapes = {parameter.name: parameter for unit in own for parameter in model.units[unit]}
        for unit in own:
            elements = experts = 0
            for parameter in model.units[unit]:
                is_apart = parameter.is_expert and ep > 1
                part, ranks = list(parameter.part(tp, ep)), shards // ep if is_apart else shards
                dimension = sharded_dimension(part, ranks)
                part[dimension] = -(-part[dimension] // ranks)
                parts[parameter.name] = torch.empty(part, dtype=stored, device="meta")
                gathered = math.prod(part) * ranks  # all other ranks pad their shards to the size of the first one
                elements, experts = (elements, experts + gathered) if is_apart else (elements + gathered, experts)
            replicated = [math.prod(parameter.shape) for parameter in model.units[unit] if parameter.tp is None]
            units.append(FSDPUnit(model.blocks[unit], elements, experts, tuple(replicated) if tp > 1 else ()))
        blocks = tuple(block for unit in own if (block := model.blocks[unit]) is not None)
        stages.append(
            Stage(
                index,
                index == len(split) - 1,
                sum(model.costs[unit] for unit in own),
                sum(part.numel() * part.element_size() for part in parts.values()),
                *memory_bytes(optimizer, parts, model.structure),
                (model.buffers + len(blocks) * model.block_buffers) * wide,
                tuple(units),
                _matrices(
                    (shapes[name].shape, parts[name].shape, tp if shapes[name].tp is None else 1)
                    for name in names_of_muon(optimizer, parts, model.structure)
                ),
                blocks,
                wrapped,
            )
        )
    return tuple(stages)


def measure_stage(config: JobConfig, mesh: Mesh, part: ModelPart) -> Stage:
    """Measure a part that is parallelized and on the meta device."""
    model = part.model
    named = dict(model.named_parameters())
    shards = {name: local_part(parameter) for name, parameter in named.items()}
    # the dtype that init_buffers uses
    wide = torch.promote_types(DTYPES[config.training.dtype], torch.float32).itemsize
    return Stage(
        part.stage,
        part.stage == num_stages(config.parallelism) - 1,
        sum(parameter.numel() for parameter in model.parameters()),  # of a DTensor: over all ranks
        sum(shard.numel() * shard.element_size() for shard in shards.values()),
        *memory_bytes(config.optimizer, shards, part.structure),
        sum(buffer.numel() * wide for buffer in model.buffers()),
        tuple(_units(model, part.structure, mesh)),
        _matrices(
            (named[name].shape, shards[name].shape, mesh.degrees["tp"] if _is_replicated_over_tp(named[name]) else 1)
            for name in names_of_muon(config.optimizer, shards, part.structure)
        ),
        tuple(part.structure.blocks.values()),
        next(wrapped_modules(model), None) is not None,
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


def _units(model: LanguageModel, structure: Structure, mesh: Mesh) -> Iterator[FSDPUnit]:
    shards = mesh.degrees["dp_shard"] * mesh.degrees["cp"]
    for names in structure.units:
        # a set, so that tied parameters count once
        parameters = {parameter for name in names for parameter in model.get_submodule(name).parameters()}
        experts = {parameter for parameter in parameters if "ep" in _axes(parameter)}
        # Coordinate 0 has a full shard; all others are padded to its size.
        elements = sum(local_part(parameter).numel() * shards for parameter in parameters - experts)
        of_experts = sum(local_part(parameter).numel() * (shards // mesh.section.ep) for parameter in experts)
        replicated = tuple(parameter.numel() for parameter in parameters if _is_replicated_over_tp(parameter))
        yield FSDPUnit(structure.blocks.get(names[0]), elements, of_experts, replicated)


def _axes(parameter: Tensor) -> tuple[str, ...]:
    return parameter.device_mesh.mesh_dim_names or () if is_dtensor(parameter) else ()


def _is_replicated_over_tp(parameter: Tensor) -> bool:
    if not is_dtensor(parameter) or "tp" not in _axes(parameter):
        return False
    axis = _axes(parameter).index("tp")
    return parameter.device_mesh.size(axis) > 1 and parameter.placements[axis].is_replicate()
