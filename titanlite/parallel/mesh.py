"""The device mesh pp x dp_replicate x dp_shard x cp x tp: axes, coordinates of ranks, process groups."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.ranks.distributed import CommConfig, World, set_timeout
from titanlite.runtime.errors import Problem, Rules
from titanlite.runtime.settings import Affects, Needs, setting
from titanlite.runtime.torch_internals import flattened, gloo_options, unflattened

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes from the outermost to the innermost, whose ranks are adjacent; ParallelismConfig has their degrees."""
DATA_AXES = ("dp_replicate", "dp_shard")
"""Axes along which ranks read different rows."""
PARAMETER_AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""Axes of torch's DeviceMesh, in which dp_shard stands for dp_shard x cp: parameters are sharded over both."""
EXPERT_AXES = ("expert_shard", "ep")
"""Axes that stand for dp_shard in the DeviceMesh of the experts, if ep > 1."""
LAYOUT = (*AXES, "ep")
"""Keys of the degrees in ParallelismConfig."""

Layout = Literal["given", "auto"]
GradientSync = Literal["every", "last", "hybrid"]
ContextParallel = Literal["heads", "gather"]
ReshardAfterForward = Literal["default", "always", "never"]
PipelineSchedule = Literal[
    "GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


_AUTO = Needs('parallelism.layout = "auto"', lambda section: section.layout == "auto")
_CONTEXT = Needs("parallelism.cp above 1", lambda section: section.cp > 1)
_PIPELINE = Needs("parallelism.pp above 1", lambda section: section.pp > 1)


@dataclass(frozen=True)
class ParallelismConfig:
    """Layout of the processes; it does not change the numerics."""

    AFFECTS: ClassVar[Affects] = "search"

    layout: Layout = "given"
    """given: the degrees below. auto: the fastest that fits, by the planner, for the number of processes; chooses
    microbatches, schedule and recomputation as well, but keeps the keys that are set."""
    hardware: str = setting("", is_path=True, needs=_AUTO)
    """With layout = "auto": the hardware profile, the name of a shipped one or a TOML file of `titanlite calibrate`.
    Empty: measured at the first start on a machine, in about a minute, and kept in the cache."""
    dp_replicate: int = setting(1, "1 switches this axis off", least=1)
    """Data-parallel replicas of the parameters."""
    dp_shard: int = setting(-1, "1 switches this axis off", least=1, unset=-1)
    """Ranks over which parameters, gradients and optimizer state are sharded; -1: all ranks that the other degrees
    leave."""
    cp: int = setting(1, "1 switches this axis off", least=1)
    """Context-parallel ranks: each holds a part of the positions of every row, and a shard of the parameters."""
    context_parallel: ContextParallel = setting("heads", needs=_CONTEXT)
    """How attention sees the other positions. heads: ranks exchange positions for heads, and each attends over entire
    rows with some of the heads. gather: each gathers all keys and values, for models with few heads."""
    ep: int = setting(1, "1 gives each rank all experts", least=1)
    """Expert-parallel ranks, among those of dp_shard x cp: each holds a part of the experts, to which the others send
    the positions that chose them."""
    tp: int = setting(1, "1 switches this axis off", least=1)
    """Tensor-parallel ranks: each holds a shard of every matrix, and of the sequence between the matrices."""
    pp: int = setting(1, "1 switches this axis off", least=1)
    """Pipeline-parallel ranks: each holds some of the layers."""
    pp_schedule: PipelineSchedule = setting("1F1B", needs=_PIPELINE)
    """Order of the microbatches. GPipe and 1F1B have one stage per rank, all others two; ZBVZeroBubble and DualPipeV
    put the first and the last stage on the same rank."""
    pp_microbatch_size: int = setting(1, needs=_PIPELINE)
    """Sequences per pipeline microbatch, at most: all are equal, and as many as the schedule needs."""
    pp_split: tuple[str, ...] = setting((), needs=_PIPELINE)
    """First module of each stage except the first stage, e.g. ["layers.2", "norm"].
    Empty: balances the time of the stages, or their parameters if that needs too much memory."""
    gradient_sync: GradientSync = "hybrid"
    """When accumulated gradients are reduced: every microbatch (least memory), the last one only (least
    communication), or hybrid: reduce-scatter at every microbatch, all-reduce over replicas at the last.
    With pp: every sends one local batch at a time through the pipeline, last and hybrid all of the optimizer step."""
    fsdp_reshard_after_forward: ReshardAfterForward = "default"
    """Whether sharded parameters are freed between forward and backward. default: frees all FSDP units but the last;
    with pp frees none, because every microbatch would gather them again."""


def resolve_degrees(section: ParallelismConfig, world_size: int) -> dict[str, int]:
    """Degree of each axis, in the order of AXES. dp_shard = -1 is resolved, to 0 if the other degrees do not fit."""
    degrees = {axis: getattr(section, axis) for axis in AXES}
    if section.dp_shard == -1:
        fixed = math.prod(degree for axis, degree in degrees.items() if axis != "dp_shard")
        degrees["dp_shard"] = world_size // fixed if fixed > 0 and world_size % fixed == 0 else 0
    return degrees


def data_degree(section: ParallelismConfig, world_size: int) -> int:
    """Number of data-parallel ranks; 0 if the section does not fit the world size."""
    degrees = resolve_degrees(section, world_size)
    return max(0, math.prod(degrees[axis] for axis in DATA_AXES))


class ModelDtypes(NamedTuple):
    """Dtypes of the parameters, of the computation and of gradient reductions."""

    parameters: torch.dtype
    compute: torch.dtype
    reduction: torch.dtype


@dataclass(frozen=True)
class ShardGroups:
    """Process groups of a parameter's shards and replicas.

    shards: the ranks of dp_shard x cp x tp, in this order, which together have each parameter; replicas: the ranks of
    dp_replicate with the same parts. None: only this rank.
    """

    shards: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None


class Mesh:
    """Coordinates of this process on the mesh axes, and, after `connect`, its process groups.

    section: of the layout. degrees: of each axis. coordinate: of this process on each axis, from 0. data_rank: its
    coordinate on the data axis, dp_replicate x dp_shard in that order, which token counts, loss and data loading use.
    groups: the process groups that training uses.
    """

    def __init__(self, section: ParallelismConfig, world: World) -> None:
        self.world = world
        self.degrees = resolve_degrees(section, world.size)
        self.section = section
        self.coordinate: dict[str, int] = {}
        rest = world.rank
        for axis, degree in reversed(self.degrees.items()):  # the last axis varies fastest
            rest, self.coordinate[axis] = divmod(rest, degree)
        self.data_degree, self.data_rank = 1, 0
        for axis in DATA_AXES:
            self.data_degree *= self.degrees[axis]
            self.data_rank = self.data_rank * self.degrees[axis] + self.coordinate[axis]
        self.device_mesh: DeviceMesh
        """torch's DeviceMesh with all PARAMETER_AXES, also those of size 1. Set by `connect`."""
        self.data_group: dist.ProcessGroup
        """The ranks of the data axis. Set by `connect`."""
        self.position_group: dist.ProcessGroup
        """The ranks with the same tp and pp coordinates: they have all positions of the global batch. Set by
        `connect`."""
        self.expert_mesh: DeviceMesh | None = None
        """The mesh of the experts, if ep > 1: device_mesh with EXPERT_AXES in place of dp_shard. Set by
        `connect`."""
        self.cp_group: dist.ProcessGroup | None = None
        """The ranks that hold the other positions of the same rows. Set by `connect` if there are any."""
        self.groups: list[dist.ProcessGroup] = []
        self._control_group: dist.ProcessGroup | None = None

    def is_first(self, axes: Iterable[str]) -> bool:
        """Whether this process has coordinate 0 on all `axes`."""
        return all(self.coordinate[axis] == 0 for axis in axes)

    @property
    def layout(self) -> dict[str, int]:
        """The degree of each axis, and ep if there is expert parallelism, for logs."""
        return self.degrees | ({"ep": self.section.ep} if self.section.ep > 1 else {})

    @property
    def is_data_leader(self) -> bool:
        """Whether this is the first of the ranks that read the same rows."""
        return self.is_first(axis for axis in AXES if axis not in DATA_AXES)

    @property
    def is_loss_leader(self) -> bool:
        """Whether this is the first of the ranks of its stage that read the same rows and compute the same loss."""
        return self.is_first(axis for axis in AXES if axis not in (*DATA_AXES, "pp"))

    def connect(self, section: CommConfig | None) -> None:
        """Create the process groups of all axes. A collective; needs torch's default group.

        section: its init_timeout_s is the timeout of these groups and the default group, until set_timeout. None: for
        simulated groups, which have no timeout.
        """
        override: dict[int | str, Any] = {}
        if section is not None and self.degrees["pp"] > 1 and self.world.backend == "gloo":
            override["pp"] = "gloo", gloo_options(timedelta(seconds=section.train_timeout_s))
        cp = self.degrees["cp"]
        sizes = self.degrees | {"dp_shard": self.degrees["dp_shard"] * cp}
        mesh = init_device_mesh(
            self.world.device_type,
            tuple(sizes[axis] for axis in PARAMETER_AXES),
            mesh_dim_names=PARAMETER_AXES,
            backend_override=override,
        )
        assert dist.group.WORLD is not None
        self.device_mesh = mesh
        data_mesh = flattened(mesh[DATA_AXES], "dp" if cp == 1 else "dp_cp")
        self.position_group = data_mesh.get_group()
        self.groups += [dist.group.WORLD, *(mesh.get_group(axis) for axis in PARAMETER_AXES), self.position_group]
        if cp > 1:
            both = unflattened(data_mesh, "dp_cp", (self.data_degree, cp), ("dp", "cp"))
            data_mesh, self.cp_group = both["dp"], both["cp"].get_group()
            self.groups += [data_mesh.get_group(), self.cp_group]
        self.data_group = data_mesh.get_group()
        if (ep := self.section.ep) > 1:
            shards = sizes["dp_shard"] // ep, ep
            self.expert_mesh = unflattened(mesh, "dp_shard", shards, EXPERT_AXES)
            self.groups += [self.expert_mesh.get_group(axis) for axis in EXPERT_AXES]
        if section is not None:
            self.set_timeout(section.init_timeout_s)  # the default of a mesh's groups is 30 minutes

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this rank on `axis` only. axis: of PARAMETER_AXES."""
        found: dist.ProcessGroup = self.device_mesh.get_group(axis)
        return found

    def shard_groups(self) -> ShardGroups:
        """The ranks that hold parts of the same parameters. A collective if there are several."""
        shards = self.device_mesh["dp_shard"].size() * self.device_mesh["tp"].size()
        replicas = self.device_mesh["dp_replicate"].size()
        group: dist.ProcessGroup | None = None
        if shards > 1:
            group = flattened(self.device_mesh["dp_shard", "tp"], "dp_shard_tp").get_group()
            self.groups.append(group)
        return ShardGroups(group, self.group("dp_replicate") if replicas > 1 else None)

    def new_group(self, timeout_s: int, *, keeps_timeout: bool = False) -> dist.ProcessGroup:
        """Create a gloo group of all ranks, for communication between hosts. A collective.

        keeps_timeout: later calls of set_timeout do not change this group.
        """
        group: dist.ProcessGroup = dist.new_group(backend="gloo")
        set_timeout([group], timeout_s)
        if not keeps_timeout:
            self.groups.append(group)
        return group

    def control_group(self, timeout_s: int) -> dist.ProcessGroup:
        """The gloo group of all ranks for exchanges of the main thread, such as a stop, the end of data, errors of a
        validation: each group costs connections. The first call is a collective, and sets the timeout."""
        if self._control_group is None:
            self._control_group = self.new_group(timeout_s)
        return self._control_group

    def set_timeout(self, seconds: int) -> None:
        """Set the timeout of later collectives in all groups."""
        set_timeout(self.groups, seconds)


def part_of_rows(rows: Tensor, rank: int, cp: int, form: ContextParallel) -> Tensor:
    """The columns of `rows`, (rows, seq_len), that are positions of a rank: (rows, seq_len / cp).

    "gather": of 2 cp parts, number `rank` and number 2 cp - 1 - rank.
    """
    if cp == 1:
        return rows
    if form == "heads":
        return rows.chunk(cp, dim=1)[rank].contiguous()
    parts = rows.chunk(2 * cp, dim=1)
    return torch.cat((parts[rank], parts[2 * cp - 1 - rank]), dim=1)


def shard_logits(section: ParallelismConfig, *, needs_logits: bool = False) -> bool:
    """Whether logits stay sharded along the vocabulary, over the tp axis. needs_logits: see Loss."""
    return section.tp > 1 and not needs_logits


def check_parallelism(section: ParallelismConfig, world_size: int) -> list[Problem]:
    """Check that degrees are positive and that their product is the world size."""
    rules = Rules("parallelism", section)
    sizes = resolve_degrees(section, world_size)
    if rules.problems or math.prod(sizes.values()) == world_size:
        return rules.problems
    given = [axis for axis in AXES if getattr(section, axis) != -1]
    degrees = [getattr(section, axis) for axis in given]
    ranks, fills = math.prod(degrees), section.dp_shard == -1
    product = f"{' x '.join(given)} = {' x '.join(map(str, degrees))} = {ranks}"
    rule = f"world size {world_size} must be {'divisible by' if fills else 'equal to'} {product}"
    largest = max((axis for axis in AXES if axis != "dp_shard"), key=lambda axis: sizes[axis])
    key = largest if fills else "dp_shard"
    change = f"change parallelism.{key}" if fills else "set parallelism.dp_shard = -1 (automatic)"
    count = f"{ranks} processes{' or a multiple of it' if fills else ''}"
    where = "NGPU=..., torchrun --nproc-per-node ...; in titanlite plan: --world-size ..."
    rules.require(key, False, rule, f"use {count} ({where}), or {change}")
    return rules.problems


def check_experts(section: ParallelismConfig, n_experts: int, world_size: int) -> list[Problem]:
    """Problems of ep with the mesh and with the number of experts of a block, 1 for a model without experts.

    Called if check_parallelism finds no problem.
    """
    sizes = resolve_degrees(section, world_size)
    ranks = sizes["dp_shard"] * sizes["cp"]
    fits = math.gcd(ranks, section.ep, n_experts)
    both = f"divides dp_shard x cp = {ranks} and model.n_experts = {n_experts}"
    rules = Rules("parallelism", section)
    rule = both if n_experts > 1 else "1 for a model without experts"
    rules.require("ep", fits == section.ep, rule, f"set parallelism.ep = {fits}")
    return rules.problems
