"""The mesh pp x dp_replicate x dp_shard x tp: the one place that knows axes, ranks and process groups."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.runtime.distributed import World, set_timeout
from titanlite.runtime.errors import Problem, check_ranges, ranged, require

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""From the outermost, whose ranks are farthest apart, to the innermost; each has its degree in ParallelismConfig."""
DATA_AXES = ("dp_replicate", "dp_shard")
"""Those along which ranks read other rows."""

GradientSync = Literal["every", "last", "hybrid"]
ReshardAfterForward = Literal["default", "always", "never"]
PipelineSchedule = Literal[
    "GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


@dataclass(frozen=True)
class ParallelismConfig:
    """How the processes are laid out. A choice of hardware, never of numerics."""

    dp_replicate: int = ranged(1, "1 switches this axis off", least=1)
    """Data-parallel replicas of the parameters."""
    dp_shard: int = ranged(-1, "1 switches this axis off", least=1, unset=-1)
    """Ranks over which parameters, gradients and optimizer state are sharded; -1: what is left of the world."""
    tp: int = ranged(1, "1 switches this axis off", least=1)
    """Tensor-parallel ranks: each holds a part of every matrix, and of the sequence between them."""
    loss_parallel: bool = True
    """With tp: the logits stay cut along the vocabulary, and the loss is computed from the parts."""
    pp: int = ranged(1, "1 switches this axis off", least=1)
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


def resolve_degrees(section: ParallelismConfig, world_size: int) -> dict[str, int]:
    """Of each axis, in the order of AXES; dp_shard = -1 becomes what is left of the world (0 where nothing fits)."""
    degrees = {axis: getattr(section, axis) for axis in AXES}
    if section.dp_shard == -1:
        fixed = math.prod(degree for axis, degree in degrees.items() if axis != "dp_shard")
        degrees["dp_shard"] = world_size // fixed if fixed > 0 and world_size % fixed == 0 else 0
    return degrees


def data_degree(section: ParallelismConfig, world_size: int) -> int:
    """Number of data-parallel ranks; 0 where the section does not fit the world."""
    degrees = resolve_degrees(section, world_size)
    return max(0, math.prod(degrees[axis] for axis in DATA_AXES))


class Mesh:
    """Where this process stands on the axes, and its process groups: known at once, and once the ranks are connected.

    degrees: of each axis. coordinate: of this process on each axis, from 0. data_rank: its coordinate on the data axis,
    which is dp_replicate x dp_shard in that order: token counts, loss and data loading go by it. groups: the process
    groups that training uses.
    """

    def __init__(self, section: ParallelismConfig, world: World) -> None:
        self.world = world
        self.degrees = resolve_degrees(section, world.size)
        self.coordinate: dict[str, int] = {}
        rest = world.rank
        for axis, degree in reversed(self.degrees.items()):  # the last axis changes from rank to rank
            rest, self.coordinate[axis] = divmod(rest, degree)
        self.data_degree, self.data_rank = 1, 0
        for axis in DATA_AXES:
            self.data_degree *= self.degrees[axis]
            self.data_rank = self.data_rank * self.degrees[axis] + self.coordinate[axis]
        self._device_mesh: DeviceMesh | None = None
        self._data_group: dist.ProcessGroup | None = None
        self.groups: list[dist.ProcessGroup] = []

    def is_first(self, axes: Iterable[str]) -> bool:
        """Whether this process has coordinate 0 on all these axes."""
        return all(self.coordinate[axis] == 0 for axis in axes)

    @property
    def is_data_leader(self) -> bool:
        """Whether it is the first of the ranks that read the same rows."""
        return self.is_first(axis for axis in AXES if axis not in DATA_AXES)

    @property
    def is_loss_leader(self) -> bool:
        """Whether it is the first of the ranks of its stage that read the same rows, and so compute the same loss."""
        return self.is_first(axis for axis in AXES if axis not in (*DATA_AXES, "pp"))

    def connect(self, timeout_s: int | None) -> None:
        """Makes the process groups of all axes; a collective, once torch's default group is there.

        timeout_s: of these groups and the default one, until set_timeout; None for simulated ones, which know none.
        """
        mesh = init_device_mesh(self.world.device_type, tuple(self.degrees.values()), mesh_dim_names=AXES)
        assert dist.group.WORLD is not None
        self._device_mesh = mesh
        self._data_group = mesh[DATA_AXES]._flatten("dp").get_group()
        self.groups += [dist.group.WORLD, *(mesh.get_group(axis) for axis in AXES), self._data_group]
        if timeout_s is not None:
            self.set_timeout(timeout_s)  # torch gives a mesh's groups its own default, 30 minutes

    @property
    def device_mesh(self) -> DeviceMesh:
        """With the axes AXES, size-1 ones included."""
        assert self._device_mesh is not None, "the ranks are not connected"
        return self._device_mesh

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks of the data axis."""
        assert self._data_group is not None, "the ranks are not connected"
        return self._data_group

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one on that axis only."""
        found: dist.ProcessGroup = self.device_mesh.get_group(axis)
        return found

    def new_group(self, timeout_s: int, *, keeps_timeout: bool = False) -> dist.ProcessGroup:
        """Another group of all ranks, of gloo, for what the hosts tell each other; a collective.

        keeps_timeout: whatever set_timeout says later.
        """
        group: dist.ProcessGroup = dist.new_group(backend="gloo")
        set_timeout([group], timeout_s)
        if not keeps_timeout:
            self.groups.append(group)
        return group

    def set_timeout(self, seconds: int) -> None:
        """Collectives of all these groups fail after so many seconds from now on."""
        set_timeout(self.groups, seconds)


def shard_logits(section: ParallelismConfig) -> bool:
    """Whether logits stay cut along the vocabulary, over the tp axis."""
    return section.loss_parallel and section.tp > 1


def check_parallelism(section: ParallelismConfig, world_size: int) -> list[Problem]:
    """Degrees are positive and their product is the number of processes."""
    key = "parallelism"
    problems = check_ranges(section, key)
    if problems:
        return problems
    sizes = resolve_degrees(section, world_size)
    if math.prod(sizes.values()) != world_size:
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
