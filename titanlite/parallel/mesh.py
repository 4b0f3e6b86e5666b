"""The device mesh pp x dp_replicate x dp_shard x tp: all four axes by name, size-1 ones included."""

from dataclasses import dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.runtime.errors import Problem, require

AXES = ("pp", "dp_replicate", "dp_shard", "tp")

GradientSync = Literal["every", "last", "hybrid"]
ReshardAfterForward = Literal["default", "always", "never"]
PipelineSchedule = Literal[
    "GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


@dataclass(frozen=True)
class ParallelismConfig:
    """How the processes are laid out. A choice of hardware, never of numerics."""

    dp_replicate: int = 1
    """Data-parallel replicas of the parameters."""
    dp_shard: int = -1
    """Ranks over which parameters, gradients and optimizer state are sharded; -1: what is left of the world."""
    tp: int = 1
    """Tensor-parallel ranks: each holds a part of every matrix, and of the sequence between them."""
    loss_parallel: bool = True
    """With tp: the logits stay cut along the vocabulary, and the loss is computed from the parts."""
    pp: int = 1
    """Pipeline-parallel ranks: each holds some of the layers."""
    pp_schedule: PipelineSchedule = "1F1B"
    """Order of the microbatches. GPipe and 1F1B have one stage per rank, all others two; ZBVZeroBubble and DualPipeV
    put the first and the last stage on the same rank."""
    pp_microbatch_size: int = 1
    """Sequences per pipeline microbatch."""
    pp_split: tuple[str, ...] = ()
    """Names of the modules at which stages begin, but for the first, e.g. ["layers.2", "norm"].
    Empty: stages with parameter counts as even as can be."""
    gradient_sync: GradientSync = "hybrid"
    """When accumulated gradients are reduced: every microbatch (least memory), the last one only (least
    communication), or hybrid: reduce-scatter at every microbatch, all-reduce over replicas at the last.
    With pp: every sends one local batch at a time through the pipeline, last and hybrid the whole optimizer step."""
    fsdp_reshard_after_forward: ReshardAfterForward = "default"
    """Whether sharded parameters are freed between forward and backward; default: all units but the last, and none with
    a schedule that splits the backward pass (InterleavedZeroBubble, ZBVZeroBubble, DualPipeV)."""


def resolve_axes(section: ParallelismConfig, world_size: int) -> tuple[int, int, int, int]:
    """Sizes of AXES; dp_shard = -1 becomes what is left of the world (0 where nothing fits)."""
    fixed = section.pp * section.dp_replicate * section.tp
    dp_shard = section.dp_shard
    if dp_shard == -1:
        dp_shard = world_size // fixed if fixed > 0 and world_size % fixed == 0 else 0
    return section.pp, section.dp_replicate, dp_shard, section.tp


def data_degree(section: ParallelismConfig, world_size: int) -> int:
    """Number of data-parallel ranks, dp_replicate x dp_shard; 0 where the section does not fit the world."""
    _, dp_replicate, dp_shard, _ = resolve_axes(section, world_size)
    return max(dp_replicate * dp_shard, 0)


def data_rank(section: ParallelismConfig, rank: int, world_size: int) -> int:
    """Where a rank of the world stands on the data axis; what the data mesh says once there is one."""
    return rank // section.tp % data_degree(section, world_size)


def speaks_for_data_rank(section: ParallelismConfig, rank: int, world_size: int) -> bool:
    """Whether it is the first of the ranks that read the same rows: first on tp, and first on pp."""
    return rank % section.tp == 0 and rank < world_size // section.pp


def shard_logits(section: ParallelismConfig) -> bool:
    """Whether logits stay cut along the vocabulary, over the tp axis."""
    return section.loss_parallel and section.tp > 1


def check_parallelism(section: ParallelismConfig, world_size: int) -> list[Problem]:
    """Degrees are positive and their product is the number of processes."""
    key = "parallelism"
    problems: list[Problem] = []
    for axis in AXES:
        degree = getattr(section, axis)
        lowest, rule = (-1, "at least 1, or -1") if axis == "dp_shard" else (1, "at least 1")
        valid = degree >= 1 or degree == lowest
        problems += require(valid, f"{key}.{axis}", degree, rule, "1 switches this axis off")
    if problems:
        return problems
    sizes = dict(zip(AXES, resolve_axes(section, world_size), strict=True))
    product = sizes["pp"] * sizes["dp_replicate"] * sizes["dp_shard"] * sizes["tp"]
    if product != world_size:
        degrees = " x ".join(f"{axis} {getattr(section, axis)}" for axis in AXES)
        processes = f"{world_size} process{'es' if world_size != 1 else ''}"
        largest = max((axis for axis in AXES if axis != "dp_shard"), key=lambda axis: sizes[axis])
        at_fault = "dp_shard" if section.dp_shard != -1 else largest
        problems += require(
            False,
            f"{key}.{at_fault}",
            getattr(section, at_fault),
            f"{degrees} must multiply to the world size, and there {'is' if world_size == 1 else 'are'} {processes}",
            f"start a matching number of processes (NGPU=..., torchrun --nproc-per-node ...), change {key}.{at_fault}"
            + ("" if section.dp_shard == -1 else f", or leave {key}.dp_shard at -1"),
        )
    return problems


def build_mesh(section: ParallelismConfig, device_type: str, world_size: int) -> tuple[DeviceMesh, DeviceMesh]:
    """(the mesh with the axes AXES, pp outermost and tp innermost; the derived data mesh of one axis "dp").

    The data axis is dp_replicate x dp_shard, in that order: token counts, loss and data loading go by it.
    """
    mesh = init_device_mesh(device_type, resolve_axes(section, world_size), mesh_dim_names=AXES)
    return mesh, mesh["dp_replicate", "dp_shard"]._flatten("dp")
