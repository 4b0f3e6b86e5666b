"""Predict the time of an optimizer step from the plan and a hardware profile.

Each rank's work is listed by planning/work.py, its traffic by planning/communication.py. A product takes its FLOPs at
the rate of its shape, elementwise operations their bytes at the bandwidth of the memory, a collective the time of ring
algorithms (Profile.collective_s). On a GPU, the parameters of the next FSDP unit are gathered, and the gradients of the
previous one reduced, while one is computed (Zhao et al., "PyTorch FSDP", 2023); all other communication is waited for.
On a CPU, communication uses the cores that compute, so nothing overlaps. Reading and tokenizing text runs ahead of the
steps, and is not part of them.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import torch

from titanlite.config.schema import JobConfig
from titanlite.models.attention import attention_dtype
from titanlite.models.family import FAMILIES
from titanlite.models.registry import meta_model
from titanlite.optim.muon import muon_dtype
from titanlite.parallel.mesh import ParallelismConfig, PipelineSchedule
from titanlite.parallel.pipeline import stage_owners
from titanlite.parallel.recompute import ActivationCheckpointConfig, recomputed_blocks
from titanlite.planning.activations import BlockKind, MicrobatchShape, features_of
from titanlite.planning.communication import LOADS, Operation, StepShape, Traffic, exchanges, reductions
from titanlite.planning.estimate import Estimate, RankPlan, microbatch_shape
from titanlite.planning.float8 import float8_products
from titanlite.planning.hardware.machine import Profile
from titanlite.planning.pipeline_order import DURATION, Action, Kind, schedule_order, simulate
from titanlite.planning.stages import Stage
from titanlite.planning.work import (
    Elementwise,
    Float8Products,
    Product,
    Work,
    block_work,
    embedding_work,
    head_work,
    noted_scores,
)
from titanlite.precision import DTYPES

PARTS = (
    *("products", "attention", "elementwise", "host", "recomputation", "loss", "input"),
    *("tp", "cp", "ep", "data parallel", "overlap", "pipeline", "update", "gaps"),
)
HIDDEN = 0.25
"""Seconds of computation that a hidden second of gathers and reductions costs on a GPU: NCCL's kernels take processors
and bandwidth of the memory from those of the computation. This, GAPS and PER_DOUBLING are fitted to published runs: to
the rows that `python -m benchmarks published` calls fitted, by robust least squares of predicted / published time. When
the chunks of the loss became larger, GAPS alone was chosen anew, so that the median of these rows is 1.00."""
GAPS = 0.05
"""Share of its predicted time that a step takes longer on a GPU: kernels do not follow each other without gaps, and
have not the highest rates of their kind."""
PER_DOUBLING = 0.013
"""The same for each doubling of the nodes: all ranks wait for the slowest one, and more ranks have a slower one."""
UNCERTAINTY = 0.17
"""|predicted / published - 1| of the tokens per second is smaller for more than 9 of 10 rows, fitted or not."""


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of a step. parts: seconds by part of PARTS, of the pipeline rank that is busy the longest; the
    part "pipeline" is its time without work, and messages between stages; "overlap" what hidden communication costs.
    least: what no schedule of a pipeline and no
    division into stages can improve on: the mean of the ranks, without idle time."""

    parts: Mapping[str, float]
    least: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())


Seconds = dict[str, float]
"""Seconds by part of PARTS."""


@dataclass(frozen=True)
class Timer:
    """Times of work on one rank. dtype: of computation. threads: CPU cores that it has for itself; work is divided
    among them, and the profile's rates are those of one."""

    profile: Profile
    dtype: torch.dtype
    threads: int

    def parts(self, work: Work) -> Seconds:
        """Seconds of products, attention, elementwise operations, and of the host. On a GPU, the host issues operations
        while the device computes: its part is what the device waits for it."""
        profile = self.profile
        products = sum(
            each.flops / profile.products(self.dtype_of(each)).at(m=each.m, k=each.k, n=each.n)
            for each in work.products
        )
        attention = 0.0
        if work.attention:
            scores = profile.scores(attention_dtype(profile.device, self.dtype))
            attention = sum(
                each.flops
                / scores["backward" if each.is_backward else "forward"].at(seq_len=each.seq_len, head_dim=each.head_dim)
                for each in work.attention
            )
        elementwise = 0.0
        if work.moved:
            others = max(work.operations - len(work.products) - len(work.attention), 1)
            elementwise = work.moved / profile.memory.at(bytes=work.moved / others)
        found = {"products": products, "attention": attention, "elementwise": elementwise}
        host = work.operations * profile.operation_s
        if profile.device == "cpu":
            return {part: seconds / self.threads for part, seconds in found.items()} | {"host": host}
        return found | {"host": max(host - sum(found.values()), 0.0)}

    def dtype_of(self, product: Product) -> torch.dtype:
        """That whose rate the product has. Without rates of float8, those of the dtype of computation."""
        if product.is_float8 and has_float8_rates(self.profile):
            return torch.float8_e4m3fn
        return torch.promote_types(self.dtype, torch.float32) if product.is_wide else self.dtype

    def seconds(self, work: Work) -> float:
        return _sum(self.parts(work))


def has_float8_rates(profile: Profile) -> bool:
    return f"{torch.float8_e4m3fn}".removeprefix("torch.") in profile.matmul


def added(*each: Mapping[str, float]) -> Seconds:
    """The sum, part by part."""
    return {part: sum(seconds.get(part, 0.0) for seconds in each) for part in dict.fromkeys(chain(*each))}


def times(seconds: Mapping[str, float], factor: float) -> Seconds:
    return {part: factor * value for part, value in seconds.items()}


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of a stage for one microbatch, as in PassWork, with the communication that is waited for."""

    forward: Seconds
    input_gradient: Seconds
    weight_gradient: Seconds
    again: Seconds

    def of(self, kind: Kind) -> Seconds:
        """Seconds of an action of a schedule."""
        if kind == "forward":
            return self.forward
        if kind == "backward":
            return added(self.again, self.input_gradient, self.weight_gradient)
        return added(self.again, self.input_gradient) if kind == "input_gradient" else self.weight_gradient


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds of a transformer block. again: of its forward pass, in full and with the recompute policy "op"."""

    passes: PassSeconds
    again: float
    again_by_op: float


@dataclass(frozen=True)
class UnitSeconds:
    """Seconds of one microbatch, without communication."""

    blocks: Mapping[BlockKind, BlockSeconds]
    embedding: PassSeconds
    head: PassSeconds


@lru_cache(maxsize=1024)  # a search predicts the same microbatches many times
def unit_seconds(
    timer: Timer,
    family: str,
    model: Any,
    microbatch: MicrobatchShape,
    ep: int,
    *,
    notes_scores: bool,
    float8: Float8Products | None,
) -> UnitSeconds:
    """model: hyper-parameters of the family. notes_scores: for QK-clip."""
    wide = torch.promote_types(timer.dtype, torch.float32)
    on_cpu = timer.profile.device == "cpu"
    ops = Elementwise(timer.dtype.itemsize, wide.itemsize, on_cpu=on_cpu, compiled=microbatch.compiled, float8=float8)
    features = features_of(meta_model(family, model), FAMILIES[family].structure(model))

    def block_seconds(kind: BlockKind) -> BlockSeconds:
        work = block_work(model, features, microbatch, ep, ops, kind)
        noted = noted_scores(model, microbatch, kind.window, ops) if notes_scores else Work()
        return BlockSeconds(
            PassSeconds(
                *map(timer.parts, (work.forward + noted, work.input_gradient, work.weight_gradient, work.again))
            ),
            timer.seconds(work.forward),
            timer.seconds(replace(work.forward, products=(), attention=())),
        )

    embedding, head = embedding_work(model, microbatch, ops), head_work(model, microbatch, ops)
    loss = (head.forward, head.input_gradient, head.weight_gradient, head.again)
    return UnitSeconds(
        {kind: block_seconds(kind) for kind in set(microbatch.kinds(model))},
        PassSeconds(timer.parts(embedding.forward), {}, timer.parts(embedding.weight_gradient), {}),
        PassSeconds(*({"loss": timer.seconds(work)} for work in loss)),
    )


class Predictor:
    """The times of one configuration on one profile."""

    def __init__(self, config: JobConfig, plan: Estimate, profile: Profile) -> None:
        self.config, self.plan, self.profile = config, plan, profile
        ranks = min(math.prod(plan.axes.values()), profile.ranks_per_node)
        self.sharing = max(ranks / profile.computing, 1.0)
        """How many ranks of a node share what one has."""
        compute = DTYPES[config.training.mixed_precision_param]
        self.timer = Timer(profile, compute, threads=max(profile.computing // ranks, 1))
        self.on_host = profile.device == "cpu"
        model = config.hyper_parameters
        microbatch = microbatch_shape(config, plan.ranks[0].shape, profile.device)
        self.kinds = microbatch.kinds(model)
        self.units = unit_seconds(
            *(self.timer, config.model.family, model, microbatch, config.parallelism.ep),
            notes_scores=config.optimizer.qk_clip > 0,
            float8=float8_products(config, profile.device),
        )

    def step(self) -> StepTime:
        """The time of an optimizer step."""
        found = self.of_kernels()
        nodes = max(math.prod(self.plan.axes.values()) / self.profile.ranks_per_node, 1)
        gaps = 0.0 if self.on_host else GAPS + PER_DOUBLING * math.log2(nodes)
        parts = _in_order({**found.parts, "gaps": gaps * found.total})
        return StepTime(parts, (1 + gaps) * found.least)

    def of_kernels(self) -> StepTime:
        """The time of a step whose kernels follow each other without gaps."""
        # most stages differ only in their place
        shape, alike = self.plan.ranks[0].shape, dict[Any, PassSeconds]()
        passes = {}
        for stage in chain.from_iterable(rank.stages for rank in self.plan.ranks):
            recomputed = recomputed_blocks(self.config.activation_checkpoint, stage.blocks)
            kinds = (tuple(self.kinds[index] for index in blocks) for blocks in (stage.blocks, recomputed))
            key = stage.index == 0, stage.is_last, stage.parameter_bytes, *kinds
            if key not in alike:
                alike[key] = self.passes(stage, shape)
            passes[stage.index] = alike[key]
        if self.config.parallelism.pp > 1:
            return self.pipeline(passes)
        (rank,) = self.plan.ranks
        count = self.plan.microbatches
        forward, backward = times(passes[0].forward, count), times(passes[0].of("backward"), count)
        behind = self.data_parallel(rank, _sum(forward), _sum(backward))
        found = added(forward, backward, behind, self.update(rank), times(self.input(rank), count))
        parts = _in_order(times(found, self.sharing))
        return StepTime(parts, _sum(parts))

    def pipeline(self, passes: Mapping[int, PassSeconds]) -> StepTime:
        plan, section = self.plan, self.config.parallelism
        shape = plan.ranks[0].shape
        boundary = shape.positions // shape.sizes["tp"] * shape.stage_width * shape.param_bytes
        send_s = self.collective("pp", "send", boundary)
        seconds = tuple(tuple(_sum(passes[stage].of(kind)) for kind in DURATION) for stage in range(plan.stages))
        microbatches = plan.microbatches // plan.schedule_steps
        busy, end = _schedule_time(section.pp, section.pp_schedule, microbatches, seconds, send_s)
        # Stages end with the reduction of their gradients and the update.
        tails, alike = [], dict[Any, Seconds]()  # most ranks differ only in their place
        for rank in plan.ranks:
            stages = ((tuple(stage.sizes), stage.shared) for stage in rank.stages)
            key = rank.pp_rank == 0, rank.traffic, rank.memory.parameters, rank.memory.optimizer, rank.owners, *stages
            if key not in alike:
                taken = times(self.input(rank), plan.microbatches if rank.pp_rank == 0 else 0)
                alike[key] = added(self.data_parallel(rank, 0.0, 0.0), self.update(rank), taken)
            tails.append(alike[key])
        total = plan.schedule_steps * end + max(map(_sum, tails))
        work = sum(plan.schedule_steps * time + _sum(tail) for time, tail in zip(busy, tails, strict=True))
        # Idle ranks leave their share to the others.
        shared = work * self.sharing / len(busy)
        longest = max(range(len(busy)), key=busy.__getitem__)
        kinds = Counter((action.kind, action.stage) for action in plan.order[longest] if action.kind in DURATION)
        parts = [times(passes[stage].of(kind), count) for (kind, stage), count in kinds.items()]
        found = added(times(added(*parts), plan.schedule_steps), tails[longest])
        # In another division into stages, owners may have fewer rounds.
        least = shared - sum(map(self.owners, plan.ranks)) * self.sharing / len(busy)
        return StepTime(_in_order({**found, "pipeline": max(total, shared) - _sum(found)}), least)

    def passes(self, stage: Stage, shape: StepShape) -> PassSeconds:
        """Seconds of a microbatch on a stage, without data parallelism."""
        units, recompute = self.units, self.config.activation_checkpoint
        blocks = Counter(self.kinds[index] for index in stage.blocks)
        again: Seconds = {}
        if recompute.mode != "none":
            # a memory budget recomputes what is cheap: elementwise operations
            is_budget = recompute.mode == "memory_budget"
            by_op = is_budget or (recompute.mode == "selective" and recompute.selective_policy == "op")
            recomputed = stage.blocks if is_budget else recomputed_blocks(recompute, stage.blocks)
            again["recomputation"] = sum(
                count * (units.blocks[kind].again_by_op if by_op else units.blocks[kind].again)
                for kind, count in Counter(self.kinds[index] for index in recomputed).items()
            )
        forward = [times(units.blocks[kind].passes.forward, count) for kind, count in blocks.items()]
        into = [times(units.blocks[kind].passes.input_gradient, count) for kind, count in blocks.items()]
        weights = [times(units.blocks[kind].passes.weight_gradient, count) for kind, count in blocks.items()]
        if stage.index == 0:
            forward.append(units.embedding.forward)
            weights.append(units.embedding.weight_gradient)
        if stage.is_last:
            forward.append(units.head.forward)
            into.append(units.head.input_gradient)
            weights.append(units.head.weight_gradient)
            again |= units.head.again
        there, back = self.exchanges(stage, shape)
        return PassSeconds(added(*forward, there), added(*into, back), added(*weights), again)

    def exchanges(self, stage: Stage, shape: StepShape) -> tuple[Seconds, Seconds]:
        """Seconds of the collectives of a microbatch over tp, cp and ep, forward and backward."""
        found = []
        for recompute in (ActivationCheckpointConfig(mode="none"), self.config.activation_checkpoint):
            parts: Seconds = {}
            for part in exchanges(stage, self.config.parallelism, recompute, shape):
                parts = added(parts, {part.axis: self.traffic(part) / shape.microbatches})
            found.append(parts)
        plain, recomputed = found
        there = times(plain, 0.5)  # each collective of the forward pass has one backward
        return there, added(recomputed, times(there, -1.0))

    def input(self, rank: RankPlan) -> Seconds:
        """Seconds of taking a microbatch from the loader: tokens, labels, positions and documents are copied."""
        moved = 2 * 4 * torch.int64.itemsize * rank.shape.positions
        return {"input": self.timer.seconds(Work(moved=moved, operations=8))}

    def data_parallel(self, rank: RankPlan, forward_s: float, backward_s: float) -> Seconds:
        """Seconds of gathers and reductions that are waited for, of copies, and of accumulation. forward_s, backward_s:
        of the computation of all microbatches, behind which a GPU hides the communication; 0: nothing is hidden."""
        shape, count = rank.shape, rank.shape.microbatches
        units = [unit for stage in rank.stages for unit in stage.units]
        elements = sum(sum(stage.sizes) for stage in rank.stages)
        accumulated = Work(
            moved=3 * (count - 1) * elements * shape.reduce_bytes, operations=(count - 1) * 9 * len(units)
        )
        parts = self.timer.parts(accumulated)
        if not any(stage.wrapped for stage in rank.stages):
            casts = DTYPES[self.config.training.dtype].itemsize + shape.param_bytes
            if casts != 2 * shape.param_bytes:
                parts = added(parts, self.timer.parts(Work(moved=2 * count * elements * casts, operations=2 * count)))
            return parts
        gathers = [part for part in rank.traffic if part.axis in ("dp_shard", "expert_shard") and _gathers(part)]
        reductions = [part for part in rank.traffic if part.axis in DATA_PARALLEL and not _gathers(part)]
        gather_s, reduce_s = (sum(map(self.traffic, each)) for each in (gathers, reductions))
        moved = 2 * sum(part.bytes for part in (*gathers, *reductions))
        operations = 8 * sum(part.calls for part in (*gathers, *reductions))
        parts = added(parts, self.timer.parts(Work(moved=moved, operations=max(operations, 1))))
        host = 2 * count * len(units) * self.profile.unit_s
        if self.on_host:
            return added(parts, {"data parallel": gather_s + reduce_s, "host": host})
        passes = sum(part.calls for part in gathers) / max(len(units), 1)  # of forward and backward passes that gather
        before = gather_s * min(count / passes, 1.0) if passes else 0.0
        again, reduced = (gather_s - before) / count, reductions_of(shape)
        per_pass = backward_s / count
        behind = _exposed(before, forward_s * min(passes / count, 1.0), len(units))
        behind += (count - reduced) * _exposed(again, per_pass, len(units))
        behind += reduced * _exposed(again + reduce_s / reduced, per_pass, len(units))
        return added(parts, {"data parallel": behind, "overlap": HIDDEN * (gather_s + reduce_s - behind)})

    def update(self, rank: RankPlan) -> Seconds:
        """Seconds of the gradient norm, clipping and the optimizer: gradients are read three times and written once,
        parameters and state read and written; of gradients sent for the sum over copies; of the loads of experts with
        biases; and of owners, their matrix products and their exchange."""
        memory = rank.memory
        moved = 4 * memory.gradients + 2 * (memory.parameters + memory.optimizer)
        units = sum(len(stage.units) for stage in rank.stages)
        seconds = self.timer.seconds(Work(moved=moved, operations=20 * units))
        shared = (each for stage in rank.stages for each in stage.shared)
        seconds += sum(others * self.collective("pp", "send", size) for size, others in shared)
        seconds += sum(self.traffic(part) for part in rank.traffic if part.axis == LOADS)
        return {"update": seconds + self.owners(rank)}

    def owners(self, rank: RankPlan) -> float:
        """Seconds of the part of the update by owners."""
        products = rank.owners.products
        if not products:
            return 0.0
        dtype = muon_dtype(self.config.optimizer, DTYPES[self.config.training.dtype])
        work = Work(products=products, operations=sum(product.count for product in products))
        return replace(self.timer, dtype=dtype).seconds(work) + sum(map(self.traffic, rank.owners.traffic))

    def traffic(self, part: Traffic) -> float:
        """Seconds of all calls."""
        return part.calls * self.collective(part.axis, part.operation, part.bytes / part.calls) if part.calls else 0.0

    def collective(self, axis: str, operation: Operation, size: float) -> float:
        """Seconds of a collective whose full tensor has `size` bytes."""
        axes, ep = self.plan.axes, self.config.parallelism.ep
        shards, tp = axes["dp_shard"] * axes["cp"], axes["tp"]
        ranks, stride = {
            "tp": (tp, 1),
            "cp": (axes["cp"], tp),
            "ep": (ep, tp),
            "expert_shard": (shards // ep, tp * ep),
            "dp_shard": (shards, tp),
            "dp_shard x tp": (shards * tp, 1),
            LOADS: (axes["dp_replicate"] * shards, tp),
            "dp_replicate": (axes["dp_replicate"], tp * shards),
            "pp": (axes["pp"], tp * shards * axes["dp_replicate"]),
        }[axis]
        inside = min(max(self.profile.ranks_per_node // stride, 1), ranks)
        # a ring passes the message of a broadcast on as an all-gather does its parts
        known = "all-gather" if operation == "broadcast" else operation
        return self.profile.collective_s(known, size, ranks, inside)


@lru_cache(maxsize=1024)  # the same for all divisions of the data-parallel ranks
def _schedule_time(
    pp: int, name: PipelineSchedule, microbatches: int, seconds: tuple[tuple[float, ...], ...], send_s: float
) -> tuple[list[float], float]:
    """simulate() of a schedule. seconds: by stage, of each kind of DURATION."""
    section = ParallelismConfig(pp=pp, pp_schedule=name)
    by_action = {(kind, stage): of[index] for stage, of in enumerate(seconds) for index, kind in enumerate(DURATION)}
    owners = stage_owners(section)

    def duration(action: Action) -> float:
        return by_action[action.kind, action.stage]

    def delay(first: int, second: int) -> float:
        return 0.0 if owners[first] == owners[second] else send_s

    return simulate(schedule_order(section, microbatches), len(owners), duration, delay)


DATA_PARALLEL = ("dp_shard", "expert_shard", "dp_replicate")


def _exposed(communication_s: float, computation_s: float, units: int) -> float:
    """The part of the communication that is not hidden by the computation: at least that of one unit, the first or the
    last."""
    return max(communication_s / units, communication_s - computation_s)


def _gathers(part: Traffic) -> bool:
    return part.operation == "all-gather"


def reductions_of(shape: StepShape) -> int:
    """Backward passes of a step that reduce gradients."""
    return max(reductions(shape, axis) for axis in ("dp_shard", "dp_replicate"))


def _sum(seconds: Mapping[str, float]) -> float:
    return sum(seconds.values())


def _in_order(seconds: Mapping[str, float]) -> Seconds:
    return {part: seconds.get(part, 0.0) for part in PARTS}


def predict(config: JobConfig, plan: Estimate, profile: Profile) -> StepTime:
    """Predict the time of an optimizer step. config, plan: as for `estimate`, with the device of the profile."""
    return Predictor(config, plan, profile).step()
