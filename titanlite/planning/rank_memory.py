"""Compute the peak memory of a rank in a step, analytically. docs/planning.md has the error against measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titanlite.parallel.mesh import ParallelismConfig
from titanlite.parallel.recompute import ActivationCheckpointConfig, recomputes
from titanlite.planning.activations import ActivationBytes
from titanlite.planning.communication import (
    StepShape,
    frees_after_forward,
    reduced_sizes,
    reduces_at_once,
    remote_neighbors,
)
from titanlite.planning.pipeline_order import peak_in_flight
from titanlite.planning.stages import FSDPUnit, Stage


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. parameters, gradients, optimizer (its state and the average of the weights), buffers (also the
    numbers of each row with bit_equal): exact, summed over its stages.

    activations: saved between forward and backward for all microbatches in flight, plus the working memory of the
    largest part of a backward pass. data_parallel: gathered parameters, and gradients before their reduction. pipeline:
    buffers for received and sent tensors. update: temporary memory of the optimizers' update, which run one after the
    other, or of a reduction of all gradients at once, when the activations are freed. microbatch: the part of
    `activations` that one microbatch keeps on one stage. in_flight: microbatches per stage at the peak of activations.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    data_parallel: int
    pipeline: int
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
        during = {"activations": self.activations, "data parallel": self.data_parallel}
        peak = during if sum(during.values()) >= self.update else {"update": self.update}
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "buffers": self.buffers,
            "pipeline": self.pipeline,
            **peak,
        }

    @property
    def total(self) -> int:
        return sum(self.items.values())


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
    most, in_flight = peak_in_flight(shape.actions, lambda index: kept[index])
    received = sum(remote_neighbors(stage, shape) for stage in stages)
    per_step = shape.microbatches // shape.schedule_steps
    parameters = sum(stage.parameter_bytes for stage in stages)
    return Memory(
        parameters=parameters,
        gradients=parameters,
        optimizer=sum(stage.optimizer_bytes for stage in stages),
        buffers=sum(stage.buffer_bytes for stage in stages),
        activations=most + max(working_bytes(stage, recompute, activations) for stage in stages),
        data_parallel=sum(data_parallel_bytes(stage, section, recompute, shape) for stage in stages),
        # torch's stages allocate an input and a gradient buffer per microbatch of a schedule step
        pipeline=received * per_step * activations.block_input,
        update=max(
            sum(stage.update_bytes for stage in stages),
            owner_bytes,
            sum(reduction_bytes(stage, shape) for stage in stages),
        ),
        microbatch=max(kept.values()),
        in_flight=in_flight,
    )


def kept_bytes(
    stage: Stage, recompute: ActivationCheckpointConfig, activations: ActivationBytes, pipelined: bool
) -> int:
    """Bytes that one microbatch keeps on a stage from its forward to its backward pass."""
    kept = sum(_block_bytes(recompute, index, activations) for index in stage.blocks)
    kept += activations.documents if stage.blocks else 0
    kept += activations.embedding if stage.index == 0 else 0
    kept += activations.head if stage.is_last else 0
    if pipelined:
        kept += 0 if stage.is_last else activations.block_input  # the schedule holds the output
        kept -= activations.block_input if stage.index > 0 and stage.blocks else 0  # counted as a pipeline buffer
    return kept


def working_bytes(stage: Stage, recompute: ActivationCheckpointConfig, activations: ActivationBytes) -> int:
    """The peak working memory of a backward pass, in addition to the memory that its microbatch keeps.

    On the last stage the loss may need the most; blocks run later, when the memory of loss and head is free.
    """
    block = 0
    for index in stage.blocks[-1:]:  # first in the backward pass, when all other blocks still keep their activations
        again = activations.block - _block_bytes(recompute, index, activations)
        block = activations.block_backward + again
    if not stage.is_last:
        return block
    return max(activations.loss, block - activations.head)


def data_parallel_bytes(
    stage: Stage, section: ParallelismConfig, recompute: ActivationCheckpointConfig, shape: StepShape
) -> int:
    """Peak bytes of gathered or cast parameters, and of gradients before their reduction.

    Gathered: all units kept gathered, the current unit, the prefetched unit (twice: it is copied out of the
    collective's buffer). Gradients: those of the stage if reduced once per step, otherwise those of one call; plus
    those of one call in both dtypes as input of the reduction, while the previous reduction may still run; and what
    hybrid adds up in the dtype of reductions. If one call reduces all, see reduction_bytes for its buffers.
    """
    sizes = [unit.size for unit in stage.units]
    if not stage.wrapped:
        return 0 if sum(sizes) * shape.param_bytes == stage.parameter_bytes else cast_bytes(stage, recompute, shape)
    # With a single reduction, the reduced gradients do not exist yet: count only the excess over them.
    all_waiting = max(sum(sizes) * shape.reduce_bytes - stage.parameter_bytes, 0)
    if reduces_at_once(stage, shape):
        waiting = sum(sizes) * shape.reduce_bytes if shape.sync == "every" else all_waiting
        return (sum(sizes) + max(sizes)) * shape.param_bytes + waiting
    largest = max(reduced_sizes(stage, shape))
    unit_gradients = largest * (shape.param_bytes + shape.reduce_bytes)
    reduces_once = shape.sync in (None, "last") and shape.microbatches > 1
    waiting = all_waiting if reduces_once else largest * shape.reduce_bytes
    if shape.sizes["dp_shard"] == 1:
        return sum(sizes) * shape.param_bytes + unit_gradients + waiting
    if shape.sync == "hybrid" and shape.microbatches > 1:
        waiting += max(sum(sizes) // shape.sizes["dp_shard"] * shape.reduce_bytes - stage.parameter_bytes, 0)
    freed = [size for index, size in enumerate(sizes) if frees_after_forward(stage, section, index)]
    stays = reduces_once or section.pp > 1  # a backward pass without reduction frees no parameters
    gathered = sum(sizes) if stays else sum(sizes) - sum(freed) + sum(sorted(freed)[-2:])
    return (gathered + largest) * shape.param_bytes + unit_gradients + waiting


def reduction_bytes(stage: Stage, shape: StepShape) -> int:
    """Gathered parameters, and input and output of a reduction of all gradients at once, after a backward pass."""
    if not stage.wrapped or not reduces_at_once(stage, shape):
        return 0
    return sum(unit.size for unit in stage.units) * (shape.param_bytes + 2 * shape.reduce_bytes)


def cast_bytes(stage: Stage, recompute: ActivationCheckpointConfig, shape: StepShape) -> int:
    """Peak bytes of cast parameters: those that backward needs again, one unit in use, and its gradient."""
    kept = sum(unit.size for unit in stage.units if keeps_casts(unit, recompute))
    return (kept + 2 * max(unit.size for unit in stage.units)) * shape.param_bytes


def keeps_casts(unit: FSDPUnit, recompute: ActivationCheckpointConfig) -> bool:
    """Whether a unit's cast parameters stay until backward, as in blocks unless they are recomputed."""
    return unit.block is not None and not recomputes(recompute, unit.block)


def _block_bytes(recompute: ActivationCheckpointConfig, index: int, activations: ActivationBytes) -> int:
    if recompute.mode == "memory_budget":
        return activations.block_input + int(recompute.memory_budget * (activations.block - activations.block_input))
    if not recomputes(recompute, index):
        return activations.block
    by_op = recompute.mode == "selective" and recompute.selective_policy == "op"
    return activations.block_by_op if by_op else activations.block_input
