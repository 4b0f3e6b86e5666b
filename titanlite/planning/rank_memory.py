"""Compute the peak memory of a rank in a step, analytically. docs/planning.md has the error against measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from titanlite.parallel.mesh import ParallelismConfig
from titanlite.parallel.recompute import ActivationCheckpointConfig, recomputes
from titanlite.planning.activations import ActivationBytes
from titanlite.planning.communication import (
    StepShape,
    frees_after_forward,
    reduced_sizes,
    reduces_at_once,
    reduces_sums,
    remote_neighbors,
)
from titanlite.planning.pipeline_order import peak_in_flight
from titanlite.planning.stages import FSDPUnit, Stage


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. parameters, gradients, optimizer (its state and the average of the weights), buffers (also the
    numbers of each row with bit_equal): exact, summed over its stages.

    activations: saved between forward and backward for all microbatches in flight, plus the working memory of the
    largest part of a backward pass. held_gradients: those of other microbatches at the same time, reduced or not.
    data_parallel: gathered parameters, and buffers of gathers and reductions, at the same time. pipeline: buffers for
    received and sent tensors. reduction, update: temporary memory when the activations are freed, of the last reduction
    and of the optimizers' updates or the sums over copies, which run one after the other. microbatch: the part of
    `activations` that one microbatch keeps on one stage. in_flight: microbatches per stage at the peak of activations.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    held_gradients: int
    data_parallel: int
    pipeline: int
    reduction: int
    update: int
    microbatch: int
    in_flight: Mapping[int, int]

    @property
    def lower_bound(self) -> int:
        """Lower bound of the peak: parameters, optimizer state and buffers, plus the larger of the gradients and half
        of the activations that one microbatch saves. Only half, because compiled blocks save less than the formulas
        say."""
        return self.parameters + self.optimizer + self.buffers + max(self.gradients, self.microbatch // 2)

    @property
    def items(self) -> dict[str, int]:
        """The items that coexist at the peak, by name."""
        during = {
            "gradients": self.held_gradients,
            "activations": self.activations,
            "data parallel": self.data_parallel,
        }
        moments = (
            during,
            {"gradients": self.gradients, "data parallel": self.reduction},
            {"gradients": self.gradients, "update": self.update},
        )
        return {
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            "buffers": self.buffers,
            "pipeline": self.pipeline,
            **max(moments, key=lambda items: sum(items.values())),
        }

    @property
    def total(self) -> int:
        return sum(self.items.values())

    @property
    def least(self) -> int:
        """The total of a step with only one microbatch, which has no gradients of others."""
        return replace(self, held_gradients=0).total


def rank_memory(
    stages: Sequence[Stage],
    section: ParallelismConfig,
    recompute: ActivationCheckpointConfig,
    shape: StepShape,
    activations: ActivationBytes,
    owner_bytes: int,
) -> Memory:
    """The memory of a rank that owns these stages. owner_bytes: temporary bytes of Muon's update."""
    kept = {stage.index: kept_bytes(stage, recompute, activations, section.pp > 1) for stage in stages}
    unreduced = {stage.index: gradient_bytes(stage, shape) for stage in stages}
    split = {stage.index: len(stage.blocks) * activations.block_split for stage in stages}
    most, held, in_flight = peak_in_flight(shape.actions, kept.__getitem__, unreduced.__getitem__, split.__getitem__)
    if section.pp == 1:  # the actions may be those of one microbatch
        held = sum(unreduced.values()) if shape.microbatches > 1 else 0
    received = sum(remote_neighbors(stage, shape) for stage in stages)
    per_step = shape.microbatches // shape.schedule_steps
    parameters = sum(stage.parameter_bytes for stage in stages)
    reductions = [reduction_bytes(stage, shape) for stage in stages]
    moments = [backward_moments(stage, section, recompute, shape, activations) for stage in stages]
    if len(stages) == 1:
        working, data_parallel = max(moments[0], key=sum)
    else:
        working = max(work for stage in moments for work, _ in stage)
        data_parallel = sum(max(beside for _, beside in stage) for stage in moments)
    return Memory(
        parameters=parameters,
        gradients=parameters,
        optimizer=sum(stage.optimizer_bytes for stage in stages),
        buffers=sum(stage.buffer_bytes for stage in stages),
        activations=most + working,
        held_gradients=held + (parameters if shape.schedule_steps > 1 else 0),
        data_parallel=data_parallel,
        # torch's stages allocate an input and a gradient buffer per microbatch of a schedule step
        pipeline=received * per_step * activations.block_input,
        reduction=sum(kept for kept, _ in reductions) + max(buffers for _, buffers in reductions),
        update=max(sum(stage.update_bytes for stage in stages), owner_bytes, *map(shared_bytes, stages)),
        microbatch=max(kept.values()),
        in_flight=in_flight,
    )


def shared_bytes(stage: Stage) -> int:
    """Peak bytes of the sum of a gradient over the ranks that have a copy of its parameter."""
    # of the others, and their sum
    return max((size * (others + 1) for size, others in stage.shared), default=0)


def kept_bytes(
    stage: Stage, recompute: ActivationCheckpointConfig, activations: ActivationBytes, pipelined: bool
) -> int:
    """Bytes that one microbatch keeps on a stage from its forward to its backward pass."""
    kept = sum(_block_bytes(recompute, index, activations) for index in stage.blocks)
    kept += activations.documents(stage.blocks) if stage.blocks else 0
    kept += activations.embedding if stage.index == 0 else 0
    kept += activations.head if stage.is_last else 0
    if pipelined:
        kept += 0 if stage.is_last else activations.block_input  # the schedule holds the output
        kept -= activations.block_input if stage.index > 0 and stage.blocks else 0  # counted as a pipeline buffer
    return kept


def backward_moments(
    stage: Stage,
    section: ParallelismConfig,
    recompute: ActivationCheckpointConfig,
    shape: StepShape,
    activations: ActivationBytes,
) -> list[tuple[int, int]]:
    """Moments at which the memory of the stage may have its peak, beside all that its microbatches keep: (working
    memory of the computation, data-parallel memory), in bytes.

    The moments are the loss on the last stage; the backward pass of the last block, which is the first one in this
    pass, when all others still keep their activations; and, if gradients of microbatches are added up, that of the
    embedding, whose own gradient may be larger than what the microbatch has kept.
    """
    block = 0
    for index in stage.blocks[-1:]:
        block = activations.block_backward + activations.blocks[index] - _block_bytes(recompute, index, activations)
    if stage.is_last:
        block -= activations.head  # which is free by then
    in_loss, in_block = data_parallel_bytes(stage, section, recompute, shape)
    moments = [(block, in_block), *([(activations.loss, in_loss)] if stage.is_last else [])]
    if stage.index == 0 and stage.wrapped and reduces_sums(shape) and not reduces_at_once(stage, shape):
        kept = kept_bytes(stage, recompute, activations, section.pp > 1)
        moments.append((-kept, (sum(stage.sizes) + stage.sizes[0]) * shape.param_bytes))
    return moments


def data_parallel_bytes(
    stage: Stage, section: ParallelismConfig, recompute: ActivationCheckpointConfig, shape: StepShape
) -> tuple[int, int]:
    """Bytes of gathered or cast parameters, and of gradients before their reduction: while the loss is computed, and in
    the backward pass of the last block.

    Gathered: all units kept gathered. The loss also has the buffer from which the last unit was copied; a block its own
    unit and the prefetched one. Gradients: those of the block; and the input of the latest reduction, which stays until
    the next one: in the loss, that of the previous microbatch. If the gradients of several microbatches are added up,
    all units stay gathered, see gradient_bytes.
    """
    sizes = stage.sizes
    if not stage.wrapped:
        casts = sum(sizes) * shape.param_bytes != stage.parameter_bytes
        return (cast_bytes(stage, recompute, shape),) * 2 if casts else (0, 0)
    if reduces_at_once(stage, shape):
        waiting = sum(sizes) * shape.reduce_bytes if shape.sync == "every" else 0
        return ((sum(sizes) + max(sizes)) * shape.param_bytes + waiting,) * 2
    calls = reduced_sizes(stage, shape)
    last, before = sizes[-1], [0, 0, *sizes[:-1]][-2:]  # the units whose backward passes come first
    if reduces_sums(shape):
        return sum(sizes) * shape.param_bytes, (sum(sizes) + before[-1]) * shape.param_bytes
    if shape.sizes["dp_shard"] == 1:
        gathered = (sum(sizes) + max(sizes)) * shape.param_bytes
        return (gathered + 2 * max(calls) * shape.reduce_bytes,) * 2
    is_freed = frees_after_forward(stage, section)
    stays = sum(size for size, freed in zip(sizes, is_freed, strict=True) if not freed)
    in_loss = stays + last * (1 + is_freed[-1])
    in_block = stays - last * (not is_freed[-1]) + sum(before) + before[-1]
    return (
        in_loss * shape.param_bytes + max(calls[0], calls[-1]) * shape.reduce_bytes,
        in_block * shape.param_bytes + calls[-1] * shape.reduce_bytes,
    )


def gradient_bytes(stage: Stage, shape: StepShape) -> int:
    """Bytes of the gradients of a stage between the microbatches of a step."""
    elements = sum(stage.sizes)
    if stage.wrapped and reduces_sums(shape):
        return elements * shape.reduce_bytes
    if stage.wrapped and shape.sync == "hybrid":  # reduced over dp_shard only
        return elements // shape.sizes["dp_shard"] * shape.reduce_bytes
    return stage.parameter_bytes


def reduction_bytes(stage: Stage, shape: StepShape) -> tuple[int, int]:
    """(gathered parameters and unreduced gradients, buffers) in bytes during the last reduction, when no activations
    are left. Stages reduce one after the other.

    If all units are reduced once, this is at the end of the last backward pass, for one after the other.
    """
    if not stage.wrapped:
        return 0, 0
    sizes, calls = stage.sizes, reduced_sizes(stage, shape)
    if reduces_at_once(stage, shape):
        return sum(sizes) * (shape.param_bytes + 2 * shape.reduce_bytes), 0
    if reduces_sums(shape):
        waiting = max(sum(sizes) * shape.reduce_bytes - stage.parameter_bytes, 0)
        return sum(sizes) * shape.param_bytes + waiting, max(calls) * shape.reduce_bytes
    return 0, calls[0] * (2 * shape.param_bytes + shape.reduce_bytes)


def cast_bytes(stage: Stage, recompute: ActivationCheckpointConfig, shape: StepShape) -> int:
    """Peak bytes of cast parameters: those that backward needs again, one unit in use, and its gradient."""
    kept = sum(size for unit, size in zip(stage.units, stage.sizes, strict=True) if keeps_casts(unit, recompute))
    return (kept + 2 * max(stage.sizes)) * shape.param_bytes


def keeps_casts(unit: FSDPUnit, recompute: ActivationCheckpointConfig) -> bool:
    """Whether a unit's cast parameters stay until backward, as in blocks unless they are recomputed."""
    return unit.block is not None and not recomputes(recompute, unit.block)


def _block_bytes(recompute: ActivationCheckpointConfig, index: int, activations: ActivationBytes) -> int:
    full = activations.blocks[index]
    if recompute.mode == "memory_budget":
        return activations.block_input + int(recompute.memory_budget * (full - activations.block_input))
    if not recomputes(recompute, index):
        return full
    by_op = recompute.mode == "selective" and recompute.selective_policy == "op"
    return activations.blocks_by_op[index] if by_op else activations.block_input
