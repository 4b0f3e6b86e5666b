"""Build one rank's part of the model on the meta device, split and parallelized as in training, without allocation."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.config.schema import JobConfig
from titanlite.models.family import LanguageModel, Plan
from titanlite.models.registry import resolve_model
from titanlite.optim.registry import state_bytes
from titanlite.parallel.compile import CompileConfig
from titanlite.parallel.data import wrapped_modules
from titanlite.parallel.mesh import Mesh, shard_logits
from titanlite.parallel.parallelize import parallelize
from titanlite.parallel.pipeline import keep_units_, num_stages, resolve_reshard_after_forward, split_stages
from titanlite.precision import DTYPES
from titanlite.runtime.distributed import World
from titanlite.runtime.dtensors import is_dtensor, local_part


@dataclass(frozen=True)
class Unit:
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
class Stage:
    """A pipeline stage on one rank.

    num_parameters: of the full stage, tied parameters counted once. The fields ..._bytes count this rank's share.
    parameter_bytes: of the parameters; the reduced gradients take as many, since they have the same dtype and sharding.
    blocks: indexes of the stage's transformer blocks in the full model. wrapped: whether FSDP or replicate wraps it.
    """

    index: int
    is_last: bool
    num_parameters: int
    parameter_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    units: tuple[Unit, ...]
    blocks: tuple[int, ...]
    wrapped: bool


@dataclass(frozen=True)
class ModelPart:
    """This rank's part of a pipeline stage, or of the full model. plan: the stage's part of the family's plan."""

    model: LanguageModel
    plan: Plan
    stage: int


@contextmanager
def simulated_mesh(config: JobConfig, world_size: int, rank: int = 0) -> Iterator[Mesh]:
    """The mesh of a simulated world with only this process, as `rank`. Collectives return at once and move no data."""
    excepthook = sys.excepthook  # which torch replaces by one that writes the rank before each line
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        mesh = Mesh(config.parallelism, World(rank, rank, world_size, "cpu"))
        mesh.connect(None)
        yield mesh
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


def build_stage(config: JobConfig, mesh: Mesh, index: int) -> Stage:
    """Build pipeline stage `index` as the rank of `mesh` would hold it.

    If a dimension is not divisible, the ranks of a stage differ: coordinate 0 of dp_shard and of tp has the largest
    shards.
    """
    family, hyper_parameters = resolve_model(config.model)
    with torch.device("meta"):
        model = family.build(hyper_parameters).to(DTYPES[config.training.dtype])
    model.tie_weights()
    plan = family.plan(hyper_parameters)
    if config.parallelism.pp > 1:
        plan = keep_units_(model, plan, split_stages(model, plan, config.parallelism)[index])
    parallelize(
        model,
        plan,
        mesh,
        shard_logits=shard_logits(config.parallelism),
        loss=config.loss,
        recompute=config.activation_checkpoint,
        compilation=CompileConfig(),  # a compiled block holds the same parameters
        param_dtype=DTYPES[config.training.mixed_precision_param],
        reduce_dtype=DTYPES[config.training.mixed_precision_reduce],
        reshard_after_forward=resolve_reshard_after_forward(config.parallelism),
    )
    model.tie_weights()
    return measure_stage(config, mesh, ModelPart(model, plan, index))


def measure_stage(config: JobConfig, mesh: Mesh, part: ModelPart) -> Stage:
    """Measure a part that is parallelized and on the meta device."""
    model = part.model
    shards = [local_part(parameter) for parameter in model.parameters()]
    # the dtype that init_buffers uses
    wide = torch.promote_types(DTYPES[config.training.dtype], torch.float32).itemsize
    return Stage(
        part.stage,
        part.stage == num_stages(config.parallelism) - 1,
        sum(parameter.numel() for parameter in model.parameters()),  # of a DTensor: over all ranks
        sum(shard.numel() * shard.element_size() for shard in shards),
        state_bytes(config.optimizer, shards),
        sum(buffer.numel() * wide for buffer in model.buffers()),
        tuple(_units(model, part.plan, mesh)),
        tuple(part.plan.blocks.values()),
        next(wrapped_modules(model), None) is not None,
    )


def _units(model: LanguageModel, plan: Plan, mesh: Mesh) -> Iterator[Unit]:
    shards = mesh.degrees["dp_shard"] * mesh.degrees["cp"]
    for names in plan.units:
        # a set, so that tied parameters count once
        parameters = {parameter for name in names for parameter in model.get_submodule(name).parameters()}
        experts = {parameter for parameter in parameters if "ep" in _axes(parameter)}
        # Coordinate 0 has a full shard; all others are padded to its size.
        elements = sum(local_part(parameter).numel() * shards for parameter in parameters - experts)
        of_experts = sum(local_part(parameter).numel() * (shards // mesh.ep) for parameter in experts)
        replicated = tuple(parameter.numel() for parameter in parameters if _is_replicated_over_tp(parameter))
        yield Unit(plan.blocks.get(names[0]), elements, of_experts, replicated)


def _axes(parameter: Tensor) -> tuple[str, ...]:
    return parameter.device_mesh.mesh_dim_names or () if is_dtensor(parameter) else ()


def _is_replicated_over_tp(parameter: Tensor) -> bool:
    if not is_dtensor(parameter) or "tp" not in _axes(parameter):
        return False
    axis = _axes(parameter).index("tp")
    return parameter.device_mesh.size(axis) > 1 and parameter.placements[axis].is_replicate()
