"""Estimate the memory, communication and FLOPs per pipeline rank and step, from a configuration and a world size."""

from collections import defaultdict
from dataclasses import dataclass

from titanlite.config.schema import JobConfig
from titanlite.models.attention import mask_form
from titanlite.models.registry import resolve_model
from titanlite.parallel.data import resolve_gradient_sync
from titanlite.parallel.mesh import Mesh, data_degree, shard_logits
from titanlite.parallel.pipeline import local_stages, rows_per_batch
from titanlite.parallel.recompute import recomputes
from titanlite.precision import DTYPES
from titanlite.tools.plan.activations import MicrobatchShape, activation_bytes, unit_flops_per_token
from titanlite.tools.plan.communication import StepShape, Traffic, stage_traffic
from titanlite.tools.plan.memory import Memory, rank_memory
from titanlite.tools.plan.schedule import bubble_share, schedule_order
from titanlite.tools.plan.stages import Stage, build_stage, simulated_mesh


@dataclass(frozen=True)
class RankPlan:
    """One pipeline rank; the numbers are those of its worst data and tp rank.

    flops: matrix products of an optimizer step without recomputation; recomputed_flops: those of recomputation.
    """

    pp_rank: int
    stages: tuple[Stage, ...]
    memory: Memory
    traffic: tuple[Traffic, ...]
    flops: int
    recomputed_flops: int


@dataclass(frozen=True)
class Estimate:
    """The plan of a run. axes: mesh sizes by name. microbatches: per step and data rank, of `rows` sequences each."""

    axes: dict[str, int]
    microbatches: int
    rows: int
    schedule_steps: int
    bubble: float
    ranks: tuple[RankPlan, ...]

    @property
    def largest(self) -> RankPlan:
        """The rank that needs the most memory."""
        return max(self.ranks, key=lambda rank: rank.memory.total)


def estimate(config: JobConfig, world_size: int, *, device_type: str) -> Estimate:
    """Estimate a run. config: checked and resolved for this world. device_type: "cuda" or "cpu"."""
    section, training = config.parallelism, config.training
    rows_per_step = training.global_batch_size // data_degree(section, world_size)
    batch = rows_per_batch(section, training.local_batch_size, rows_per_step)
    rows = section.pp_microbatch_size if section.pp > 1 else batch
    schedule_steps = rows_per_step // batch if section.pp > 1 else 1
    microbatches = rows_per_step // rows
    order = schedule_order(section, microbatches // schedule_steps)
    with simulated_mesh(config, world_size) as mesh:
        axes = mesh.degrees
        ranks = []
        for pp_rank, actions in enumerate(order):
            stages = tuple(build_stage(config, mesh, index) for index in local_stages(section, pp_rank))
            shape = StepShape(
                sizes=axes,
                sync=resolve_gradient_sync(section.gradient_sync, mesh.device_mesh),
                actions=actions,
                schedule_steps=schedule_steps,
                microbatches=microbatches,
                positions=rows * training.seq_len,
                dim=resolve_model(config.model)[1].dim,
                vocab_size=resolve_model(config.model)[1].vocab_size,
                param_bytes=DTYPES[training.mixed_precision_param].itemsize,
                reduce_bytes=DTYPES[training.mixed_precision_reduce].itemsize,
                loss_bytes=max(4, DTYPES[training.mixed_precision_param].itemsize),
            )
            ranks.append(_rank_plan(config, mesh, pp_rank, stages, shape, device_type))
    bubble = bubble_share(section, microbatches // schedule_steps)
    return Estimate(axes, microbatches, rows, schedule_steps, bubble, tuple(ranks))


def _rank_plan(
    config: JobConfig, mesh: Mesh, pp_rank: int, stages: tuple[Stage, ...], shape: StepShape, device_type: str
) -> RankPlan:
    section, recompute = config.parallelism, config.activation_checkpoint
    family, hyper_parameters = resolve_model(config.model)
    tp = mesh.degrees["tp"]
    dtype = DTYPES[config.training.mixed_precision_param]
    form = mask_form(device_type, dtype, hyper_parameters.head_dim)
    microbatch = MicrobatchShape(
        rows=shape.positions // config.training.seq_len,
        seq_len=config.training.seq_len,
        tp=tp,
        element_bytes=shape.param_bytes,
        shard_logits=shard_logits(section),
        fused_norm=device_type == "cuda",
        mask=form if config.data.document_mask else None,
    )
    plan = family.plan(hyper_parameters)
    activations = activation_bytes(hyper_parameters, plan, microbatch)
    traffic: dict[tuple[str, str], Traffic] = {}
    for stage in stages:
        for part in stage_traffic(stage, section, recompute, shape):
            key = (part.axis, part.operation)
            before = traffic.get(key)
            calls, moved = (before.calls, before.bytes) if before else (0, 0)
            traffic[key] = Traffic(part.axis, part.operation, calls + part.calls, moved + part.bytes, part.ranks)
    tokens = shape.microbatches * shape.positions
    flops: dict[str, int] = defaultdict(int)
    for stage in stages:
        blocks = iter(stage.blocks)
        for unit in stage.units:
            unit_flops = unit_flops_per_token(hyper_parameters, config.training.seq_len, unit.name)
            flops["model"] += unit_flops * tokens // tp
            index = next(blocks, None) if unit.name in plan.blocks else None
            by_op = recompute.mode == "selective" and recompute.selective_policy == "op"
            if index is not None and recomputes(recompute, index) and not by_op:
                flops["again"] += unit_flops // 3 * tokens // tp  # a forward pass is a third of a step
    memory = rank_memory(stages, section, recompute, config.optimizer, shape, activations)
    return RankPlan(pp_rank, stages, memory, tuple(traffic.values()), flops["model"], flops["again"])
