"""Run the program of one rank of a large job: its start, two steps, and what it would save, on fake tensors."""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from titanlite.assembly import model as assembly
from titanlite.assembly.job import Job, job_of
from titanlite.batch import Batch
from titanlite.checkpoint.state import MODEL, OPTIMIZER
from titanlite.config.schema import JobConfig
from titanlite.models.family import saved_tensors
from titanlite.parallel.mesh import EXPERT_AXES, PARAMETER_AXES, Mesh
from titanlite.planning.communication import LOADS
from titanlite.planning.estimate import RankPlan, estimate, has_estimate
from titanlite.ranks.distributed import World
from titanlite.runtime.torch_internals import (
    clear_sharding_cache,
    fake_tensors,
    fsdp_parameters,
    local_part,
    storage_key,
)
from titanlite.tools.plan.rehearsal.fakes import fake_program
from titanlite.tools.plan.rehearsal.host import HostTensors
from titanlite.tools.plan.rehearsal.ranks import most_microbatches
from titanlite.tools.plan.rehearsal.recorder import Kind, Recorder
from titanlite.trainer import Trainer

CPU = torch.device("cpu")
STEPS = 2
"""The first one also has torch's caches and the state of the optimizer, the last one is counted."""


@dataclass(frozen=True)
class Rehearsal:
    """What a rank does in a step.

    plan: None if the family has no estimate. collectives: (calls, bytes) by (axis, operation). order: all of them, one
    after the other, as (axes of the group, operation, bytes). peak: of the living storages, in bytes; kinds: theirs,
    within 1 % of it. host_reads: by place. mixed: functions that get tensors of the host beside those of the device, by
    place. microbatches: of the rehearsed step, and of the job's; further: bytes that the others add to the peak by the
    plan. groups: sizes of the process groups by axis. saved: tensors and bytes of this rank's shards in a checkpoint,
    before copies on other ranks are left out.
    """

    plan: RankPlan | None
    collectives: Mapping[tuple[str, str], tuple[int, int]]
    order: Sequence[tuple[str, str, int]]
    peak: int
    kinds: Mapping[Kind, int]
    host_reads: Mapping[str, int]
    mixed: Mapping[str, int]
    microbatches: tuple[int, int]
    further: int
    groups: Mapping[str, int]
    saved: tuple[int, int]

    @property
    def differences(self) -> list[str]:
        """The collectives that are not as planned."""
        if self.plan is None:
            return []
        planned: dict[tuple[str, str], tuple[int, int]] = {
            (each.axis, each.operation): (each.calls, each.bytes) for each in self.plan.traffic
        }
        return [
            f"{' '.join(key)}: {real[0]:,} calls, {real[1]:,} bytes; planned {plan[0]:,} calls, {plan[1]:,} bytes"
            for key in sorted(planned.keys() | self.collectives.keys())
            if (real := self.collectives.get(key, (0, 0))) != (plan := planned.get(key, (0, 0)))
        ]

    @property
    def ratio(self) -> float:
        """Measured / planned peak; 1.0 without a plan."""
        return 1.0 if self.plan is None else self.peak / self.plan.memory.total


def rehearse(config: JobConfig, ranks: int, rank: int) -> Rehearsal:
    """Run STEPS steps of a rank. config: for `ranks` ranks with GPUs, of one training stage."""
    config = for_fakes(config, ranks)
    job, excepthook = job_of(config, ranks), sys.excepthook  # which torch replaces
    full, job = job, shortened(job, ranks)
    config = job.config
    host = HostTensors()
    recorder = Recorder(max(job.step.rows_per_batch, 2))  # losses of rows; numbers of rows and tokens
    dist.init_process_group("fake", rank=rank, world_size=ranks)
    try:
        mesh = Mesh(config.parallelism, World(rank, rank, ranks, "cpu"))
        mesh.connect(None)
        numbers = torch.arange(job.step.rows_per_batch)  # the host reads them
        with fake_program(recorder):
            parts = assembly.build_parts(config, mesh)
            with fake_tensors(), recorder, host:
                program = assembly.build_trainer(job, assembly.allocate_parts(config, parts, CPU), mesh, CPU)
                if config.training.bit_equal:  # a number of each parameter is exchanged over pp
                    recorder.scalars += sum(len([*part.parameters()]) for part in program.model_parts)
                held = Held(program)
                recorder.held = held
                tokens = torch.zeros(job.step.rows_per_batch, config.training.seq_len, dtype=torch.int64, device=CPU)
                batches = [Batch(tokens, tokens, numbers, numbers)] * job.step.batches
                for _ in range(STEPS):
                    recorder.start()
                    program.train_step(batches)
                    held.note_state(recorder)
            saved = saved_by(program)
        plan, further = None, 0
        if has_estimate(config):
            plan, of_job = (
                estimate(each.config, ranks, device_type="cuda").ranks[mesh.coordinate["pp"]] for each in (job, full)
            )
            further = of_job.memory.total - plan.memory.total
        axes: dict[str, list[str]] = {}
        groups = dict(groups_of(mesh))
        for axis, group in groups.items():
            axes.setdefault(group.group_name, []).append(axis)
        collectives = {
            (_axis(axes.get(name, [name]), operation, plan), operation): (calls, recorder.bytes[name, operation])
            for (name, operation), calls in recorder.collectives.items()
        }
        order = [(" = ".join(axes.get(name, [name])), operation, size) for name, operation, size in recorder.order]
        return Rehearsal(
            plan,
            collectives,
            order,
            recorder.peak,
            recorder.kinds,
            host_reads=+recorder.host_reads,
            mixed=+host.places,
            microbatches=(job.step.microbatches, full.step.microbatches),
            further=further,
            groups={axis: group.size() for axis, group in groups.items() if group.size() > 1},
            saved=saved,
        )
    finally:
        dist.destroy_process_group()
        clear_sharding_cache()  # which refers to the groups
        sys.excepthook = excepthook


def for_fakes(config: JobConfig, ranks: int) -> JobConfig:
    """The configuration without compilation, and with the chunks of the loss that a GPU has."""
    config = replace(config, compile=replace(config.compile, enable=False))
    if not has_estimate(config):
        return config
    chunk = estimate(config, ranks, device_type="cuda").ranks[0].shape.loss_chunk
    return replace(config, loss=replace(config.loss, chunk_tokens=chunk))


def shortened(job: Job, ranks: int) -> Job:
    """The job with at most two microbatches in a step, with pp at most twice as many as stages of the pipeline."""
    config, step = job.config, job.step
    most = most_microbatches(config.parallelism)
    if step.microbatches <= most:
        return job
    size = step.size * most * (ranks // _ranks_per_data_rank(config))
    training = replace(config.training, global_batch_size=size)
    data = replace(config.data, num_streams=size)
    return job_of(replace(config, training=training, data=data), ranks)


def _ranks_per_data_rank(config: JobConfig) -> int:
    section = config.parallelism
    return section.pp * section.cp * section.tp


class Held:
    """What holds the storages of a trainer, see recorder.Held. Made before its first step, when no parameter is
    gathered."""

    def __init__(self, trainer: Trainer) -> None:
        parts = trainer.model_parts
        self._parameters = [parameter for part in parts for parameter in part.parameters()]
        self._managed = [each for part in parts for each in fsdp_parameters(part)]
        self._lasting: dict[int, Kind] = {
            storage_key(buffer): "buffers" for part in parts for buffer in part.buffers() if buffer.device == CPU
        }
        self._lasting |= {storage_key(local_part(parameter)): "parameters" for parameter in self._parameters}

    def __call__(self) -> dict[int, Kind]:
        gradients = [parameter.grad for parameter in self._parameters]
        gradients += [getattr(each, "unsharded_accumulated_grad", None) for each in self._managed]
        return {
            **{storage_key(local_part(each)): "gradients" for each in gradients if each is not None},
            **self._lasting,
        }

    def note_state(self, recorder: Recorder) -> None:
        """After a step: what the optimizer has made lives on."""
        held = self()
        made = (key for key, maker in recorder.makers.items() if maker == "update" and key not in held)
        self._lasting |= dict.fromkeys(made, "optimizer")


def saved_by(trainer: Trainer) -> tuple[int, int]:
    """(tensors, bytes) of this rank's shards in a checkpoint, by the plan that torch makes of them."""
    tensors = {MODEL + name: each for part in trainer.model_parts for name, each in saved_tensors(part).items()}
    tensors |= {OPTIMIZER + name: tensor for name, tensor in trainer.optimizer.named_state()}
    items = create_default_local_save_plan(tensors, is_coordinator=True).items
    sizes = Counter[str]()
    for item in items:
        assert item.tensor_data is not None
        sizes[item.index.fqn] += item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
    return len(items), sizes.total()


def groups_of(mesh: Mesh) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """The groups by their name in the plan."""
    yield from ((axis, mesh.group(axis)) for axis in PARAMETER_AXES)
    if mesh.expert_mesh is not None:
        yield from ((axis, mesh.expert_mesh.get_group(axis)) for axis in EXPERT_AXES)
    if mesh.cp_group is not None:
        yield "cp", mesh.cp_group
    yield LOADS, mesh.position_group
    if (shards := mesh.shard_groups().shards) is not None:
        yield "dp_shard x tp", shards


def _axis(axes: list[str], operation: str, plan: RankPlan | None) -> str:
    """The axis of a group that may stand for several: the one for which the operation is planned."""
    planned = {(each.axis, each.operation) for each in plan.traffic} if plan is not None else set()
    return next((axis for axis in axes if (axis, operation) in planned), axes[0])
