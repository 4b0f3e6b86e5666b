"""What a rank holds at the peak of a step, by arithmetic; how far off that is stands in docs/parallelism.md."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titanlite.optim.optimizer import OptimizerConfig
from titanlite.optim.registry import update_bytes
from titanlite.parallel.mesh import ParallelismConfig
from titanlite.parallel.pipeline import num_stages
from titanlite.parallel.recompute import ActivationCheckpointConfig, recomputes
from titanlite.tools.plan.activations import ActivationBytes
from titanlite.tools.plan.communication import StepShape, frees_after_forward
from titanlite.tools.plan.schedule import peak_in_flight
from titanlite.tools.plan.stages import Stage


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. parameters, gradients, optimizer, buffers: exact, of all its stages.

    activations: kept between forward and backward, of all microbatches in flight, and the working memory of the
    largest single piece of a backward pass. data_parallel: gathered parameters, and gradients that are not reduced
    yet. pipeline: what is received and sent. update: what an update takes beside the state, when activations are gone.
    in_flight: microbatches of each stage at the peak of activations.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    data_parallel: int
    pipeline: int
    update: int
    in_flight: Mapping[int, int]

    @property
    def items(self) -> dict[str, int]:
        """What is there at the same time at the peak, by name."""
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
    optimizer: OptimizerConfig,
    shape: StepShape,
    activations: ActivationBytes,
) -> Memory:
    """Of a rank that owns these stages."""
    last = num_stages(section) - 1
    kept = {
        stage.index: kept_bytes(stage, recompute, activations, section.pp > 1, stage.index == last) for stage in stages
    }
    most, in_flight = peak_in_flight(shape.actions, lambda index: kept[index])
    owned = {stage.index for stage in stages}
    received = sum(
        (stage.index > 0 and stage.index - 1 not in owned) + (stage.index < last and stage.index + 1 not in owned)
        for stage in stages
    )
    per_step = shape.microbatches // shape.schedule_steps
    tensors, parameters = sum(stage.num_tensors for stage in stages), sum(stage.parameter_bytes for stage in stages)
    return Memory(
        parameters=parameters,
        gradients=sum(stage.gradient_bytes for stage in stages),
        optimizer=sum(stage.optimizer_bytes for stage in stages),
        buffers=sum(stage.buffer_bytes for stage in stages),
        activations=most + max(working_bytes(stage, recompute, activations, stage.index == last) for stage in stages),
        data_parallel=sum(data_parallel_bytes(stage, section, shape) for stage in stages),
        # torch's stages have a buffer for every microbatch of a schedule step, for inputs and for gradients
        pipeline=received * per_step * activations.block_input if section.pp > 1 else 0,
        update=update_bytes(optimizer, parameters, tensors),
        in_flight=in_flight,
    )


def kept_bytes(
    stage: Stage, recompute: ActivationCheckpointConfig, activations: ActivationBytes, pipelined: bool, last: bool
) -> int:
    """What one microbatch keeps on a stage from its forward to its backward pass."""
    kept = sum(_block_bytes(recompute, index, activations) for index in stage.blocks)
    kept += activations.documents if stage.blocks else 0
    kept += activations.embedding if stage.index == 0 else 0
    kept += activations.head + activations.loss if last else 0
    if pipelined:
        kept += activations.logits if last else activations.block_input  # the stage's output, held by the schedule
        kept -= activations.block_input if stage.index > 0 and stage.blocks else 0  # it is the buffer of the receiver
    return kept


def working_bytes(stage: Stage, recompute: ActivationCheckpointConfig, activations: ActivationBytes, last: bool) -> int:
    """The most that one piece of a backward pass takes beside what its microbatch has kept.

    On the last stage that may be the loss; what a block needs comes later, when loss and head are done.
    """
    indexes = stage.blocks[-1:]  # the first in the backward pass, when all blocks before it still keep theirs
    again = sum(activations.block - _block_bytes(recompute, index, activations) for index in indexes)
    block = sum(activations.block_backward for _ in indexes) + again
    if not last:
        return block
    return max(activations.loss_backward, block - activations.head - activations.loss)


def data_parallel_bytes(stage: Stage, section: ParallelismConfig, shape: StepShape) -> int:
    """Parameters that are gathered, or cast, and gradients that are not reduced yet, where it takes most.

    Gathered: the units that stay, and of the others the one in use and the next one, which is copied out of the
    collective's own buffer. Gradients: all of the stage's where they are reduced once per step, else one unit's; and
    one unit's in both dtypes on its way into the reduction, while the one before may still be under way.
    """
    if not stage.wrapped:
        return 0
    sizes = [unit.elements for unit in stage.units]
    largest = max(sizes)
    unit_gradients = largest * (shape.param_bytes + shape.reduce_bytes)
    reduces_once = shape.sync in (None, "last") and shape.microbatches > 1
    # Where all wait for one reduction, the reduced ones are not there yet: only what is more than those is counted.
    all_waiting = max(sum(sizes) * shape.reduce_bytes - stage.gradient_bytes, 0)
    waiting = all_waiting if reduces_once else largest * shape.reduce_bytes
    if shape.sizes["dp_shard"] == 1:
        return sum(sizes) * shape.param_bytes + unit_gradients + waiting
    freed = [size for index, size in enumerate(sizes) if frees_after_forward(stage, section, index)]
    stays = reduces_once or section.pp > 1  # after a backward pass without reduction nothing is freed
    gathered = sum(sizes) if stays else sum(sizes) - sum(freed) + sum(sorted(freed)[-2:])
    return (gathered + largest) * shape.param_bytes + unit_gradients + waiting


def _block_bytes(recompute: ActivationCheckpointConfig, index: int, activations: ActivationBytes) -> int:
    if not recomputes(recompute, index):
        return activations.block
    by_op = recompute.mode == "selective" and recompute.selective_policy == "op"
    return activations.block_by_op if by_op else activations.block_input
