"""Pipeline parallelism: the stages of each rank, and the schedule that runs them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.models.family import LanguageModel, Structure, parameters_of
from titanlite.parallel.mesh import ParallelismConfig, PipelineSchedule, ReshardAfterForward
from titanlite.profiling.regions import Region, in_region
from titanlite.runtime.errors import Problem, Rules
from titanlite.runtime.torch_internals import local_part, set_compiler, share_parameter


@dataclass(frozen=True)
class ModelPart:
    """This rank's part of a pipeline stage, or of the full model. structure: the stage's part of the family's."""

    model: LanguageModel
    structure: Structure
    stage: int


@dataclass(frozen=True)
class ScheduleShape:
    """Stages of a pipeline schedule.

    stages_per_rank: number of stages on each rank. placement: indexes of the two stages of rank p of P: loop: p and
    P + p; v: p and 2P - 1 - p. splits_backward: whether input gradients are computed separately from weight gradients.
    keeps_last: whether the last stage has several microbatches between forward and backward.
    """

    stages_per_rank: Literal[1, 2]
    placement: Literal["loop", "v"] = "loop"
    splits_backward: bool = False
    keeps_last: bool = False


SCHEDULES: dict[PipelineSchedule, ScheduleShape] = {
    "GPipe": ScheduleShape(1, keeps_last=True),
    "1F1B": ScheduleShape(1),
    "LoopedBFS": ScheduleShape(2, keeps_last=True),
    "Interleaved1F1B": ScheduleShape(2),
    "InterleavedZeroBubble": ScheduleShape(2, splits_backward=True, keeps_last=True),
    "ZBVZeroBubble": ScheduleShape(2, "v", splits_backward=True),
    "DualPipeV": ScheduleShape(2, "v", splits_backward=True),
}


STAGE_REGIONS: dict[str, Region] = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "backward",
    "perform_reduce_grad": "reduce",
}
"""Method of torch's stages -> its name in a trace."""


def num_stages(section: ParallelismConfig) -> int:
    """Number of pipeline stages over all ranks; 1 without a pipeline."""
    return section.pp * SCHEDULES[section.pp_schedule].stages_per_rank if section.pp > 1 else 1


def splits_backward(section: ParallelismConfig) -> bool:
    """Whether the pipeline, if any, computes gradients of weights separately from those of inputs."""
    return section.pp > 1 and SCHEDULES[section.pp_schedule].splits_backward


def logits_again(section: ParallelismConfig, *, bit_equal: bool = False) -> int:
    """How often backward computes the logits of a microbatch again, see LossComputation.recomputes: each half of a
    split backward pass if the gradients of several microbatches would be kept. bit_equal: all layouts compute alike."""
    keeps = section.pp > 1 and SCHEDULES[section.pp_schedule].keeps_last
    return 1 + splits_backward(section) if keeps or bit_equal else 0


def local_stages(section: ParallelismConfig, pp_rank: int) -> list[int]:
    """Indexes of the stages that a rank of the pp axis owns, ascending."""
    if section.pp == 1:
        return [0]
    shape = SCHEDULES[section.pp_schedule]
    if shape.stages_per_rank == 1:
        return [pp_rank]
    return [pp_rank, 2 * section.pp - 1 - pp_rank if shape.placement == "v" else section.pp + pp_rank]


def stage_owners(section: ParallelismConfig) -> list[int]:
    """Rank on the pp axis of each stage."""
    owners = {stage: rank for rank in range(section.pp) for stage in local_stages(section, rank)}
    return [owners[stage] for stage in range(num_stages(section))]


def forward_timetable(owners: Sequence[int], num_microbatches: int) -> list[list[tuple[int, int]]]:
    """Schedule of a forward pass without backward: the (stage, microbatch) pairs computed at each time step.

    owners: from stage_owners. A rank computes one pair at a time; a microbatch passes the stages in order.
    """
    begins: list[int] = []
    for stage, owner in enumerate(owners):
        free = [begins[other] + num_microbatches for other in range(stage) if owners[other] == owner]
        begins.append(max([0, *(begin + 1 for begin in begins[-1:]), *free]))
    return [
        [(stage, time - begin) for stage, begin in enumerate(begins) if 0 <= time - begin < num_microbatches]
        for time in range(begins[-1] + num_microbatches)
    ]


def fits_schedule(section: ParallelismConfig, microbatches: int) -> bool:
    """Whether torch runs the schedule with this number of microbatches in a pass."""
    # With fewer than pp microbatches, any schedule leaves ranks idle; torch refuses to run these two.
    fewest = {"1F1B": section.pp, "DualPipeV": 2 * section.pp}.get(section.pp_schedule, 1)
    rounds = max(1, microbatches // section.pp)
    in_rounds = section.pp_schedule in ("Interleaved1F1B", "InterleavedZeroBubble")
    return microbatches >= fewest and not (in_rounds and microbatches % rounds)


def resolve_reshard_after_forward(section: ParallelismConfig) -> ReshardAfterForward:
    """The policy for sharded parameters; with a pipeline, "default" is "never".

    A pipeline would gather a freed unit again for each microbatch, and the peak would not fall: backward passes without
    a reduction free nothing. A schedule that splits the backward pass needs "never": at the start of the first half
    (input gradients), torch records the weights for the second half. The weights of a freed FSDP unit are not gathered
    at that point, so their gradients would silently be missing.
    """
    policy = section.fsdp_reshard_after_forward
    return "never" if section.pp > 1 and policy == "default" else policy


def check_pipeline(section: ParallelismConfig, structure: Structure, *, bit_equal: bool = False) -> list[Problem]:
    """Check the pp_... keys for a model with this structure. They have no effect if pp is 1."""
    rules = Rules("parallelism", section)
    if section.pp <= 1:
        return []
    stages, schedule, splits = num_stages(section), section.pp_schedule, splits_backward(section)
    rule = f"{schedule} needs {stages} stages; the model can be split into at most {1 + len(structure.cuts)}"
    remedy = "fewer stages (a smaller pp, or a schedule with one stage per rank: 1F1B, GPipe), or more model.n_layers"
    rules.require("pp", stages <= 1 + len(structure.cuts), rule, remedy)
    shared = ", ".join(structure.shared)
    rule = f"1 with training.bit_equal: each stage would round its own part of the gradient of {shared}"
    remedy = "model.tie_embeddings = false and model.n_further_tokens = 0, or training.bit_equal = false"
    rules.require("pp", not (bit_equal and structure.shared), rule, remedy)
    # Older versions cannot split the backward pass of an autograd.Function, such as the loss, nor of compiled code.
    # TorchVersion compares versions, not strings.
    rule = f"needs torch 2.13, and torch is {torch.__version__}"
    remedy = "another schedule, such as Interleaved1F1B, or a newer torch"
    rules.require("pp_schedule", not splits or torch.__version__ >= "2.13", rule, remedy)
    twice = splits and any(len(others) > 1 for others in structure.shared.values())
    rule = f"not {schedule} with a weight that modules of one stage share: it computes weight gradients later"
    remedy = "another schedule, such as Interleaved1F1B, model.tie_embeddings = false, or model.n_further_tokens = 0"
    rules.require("pp_schedule", not twice, rule, remedy)
    drops = section.dp_shard * section.cp != 1 and splits and section.fsdp_reshard_after_forward == "always"
    rule = f"not with {schedule}, which computes weight gradients later: torch drops those of freed parameters"
    rules.require("fsdp_reshard_after_forward", not drops, rule, '"default" or "never", or another pp_schedule')
    cuts, given = structure.cuts, list(section.pp_split)
    unknown = [name for name in given if name not in cuts]
    rule = f"modules at which a stage can begin; {', '.join(unknown)} cannot"
    if rules.require("pp_split", not unknown, rule, f"choose from {_shortened(cuts)}") and given:
        in_order = len(given) == stages - 1 and given == [name for name in cuts if name in given]
        rule = f"{stages - 1} different names in the model's order, one for each of the {stages} stages but the first"
        rules.require("pp_split", in_order, rule, "list the first module of each of them, or leave it out")
    rules.require("pp_microbatch_size", section.pp_microbatch_size >= 1, "at least 1", "1 is the usual value")
    return rules.problems


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 6 else [*names[:3], "…", *names[-2:]])


def schedule_class(name: PipelineSchedule) -> Any:
    """torch's class of a schedule."""
    # slow to import: it imports torch._dynamo, 0.6 seconds of CPU time, which a run without pipeline does not need
    from torch.distributed.pipelining.schedules import get_schedule_class

    return get_schedule_class(name)


class Pipeline:
    """The stages of this rank and their schedule, for forward and backward passes of entire batches. A collective.

    Mesh axis: pp. Stages reduce their gradients over the data axes once, at the end of each schedule step.
    """

    def __init__(
        self,
        model_parts: Sequence[nn.Module],
        section: ParallelismConfig,
        mesh: DeviceMesh,
        device: torch.device,
        *,
        microbatches: int,
        microbatch_size: int,
        seq_len: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        """
        microbatches: of a batch, of microbatch_size rows each. seq_len: of entire rows. width, dtype: of what a
        stage passes to the next one, and of the computation.
        """
        from torch.distributed.pipelining import PipelineStage  # slow to import: see schedule_class

        indexes = local_stages(section, mesh["pp"].get_local_rank())
        last = num_stages(section) - 1
        self._microbatch_size, self._tp = microbatch_size, section.tp
        own_positions = seq_len // section.cp
        tokens = torch.empty(self._microbatch_size, own_positions, dtype=torch.int64, device="meta")
        self._boundary = tokens.new_empty(
            self._microbatch_size, own_positions // section.tp, width, dtype=dtype, requires_grad=True
        )
        """Output of a stage for the next stage, on the meta device."""
        shares = tokens.new_empty(len(tokens), dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
        stages = [
            PipelineStage(
                part,
                index,
                last + 1,
                device,
                # Without these, torch infers shapes by an additional run of the model, which clears gradients.
                input_args=tokens if index == 0 else self._boundary,
                output_args=shares if index == last else self._boundary,
                group=mesh.get_group("pp"),
            )
            for part, index in zip(model_parts, indexes, strict=True)
        ]
        for stage in stages:
            for method, name in STAGE_REGIONS.items():
                setattr(stage, method, in_region(name, getattr(stage, method)))
            setattr(stage, "perform_reduce_grad", self._if_reducing(stage.perform_reduce_grad))  # noqa: B010
        self.reduces = True
        """Whether the next batch ends with a reduction; otherwise its gradients are added to those of the next one."""
        self._device = device
        self._parts = dict(zip(indexes, model_parts, strict=True))
        self._owners = stage_owners(section)
        self._group = mesh.get_group("pp")
        self._owns_first = 0 in indexes
        self.owns_last = last in indexes
        """Whether this rank has the last stage, which computes the losses."""
        self._row_shares: list[Tensor] = []
        if splits_backward(section):
            # Compiled backward passes would free buffers that the second half of a split backward still needs.
            set_compiler(donated_buffer=False)
        self._schedule = schedule_class(section.pp_schedule)(
            stages if len(stages) > 1 else stages[0],
            n_microbatches=microbatches,
            loss_fn=self._keep_shares,
            scale_grads=False,  # the loss is already divided by the valid tokens of the global batch
        )
        # NCCL: the first call in a group must be one of all its ranks, and sends and receives are of some.
        dist.all_reduce(torch.zeros((), device=device), group=self._group)

    def forward_backward(self, tokens: Tensor, **keys: Tensor) -> Tensor:
        """Accumulate the gradients of the batch's share of the mean loss; return the share of each row, (rows,).

        keys: further arguments of every stage's forward, with one row per row of the batch; labels among them. The
        shares are 0 except on the ranks of the last stage. Raises the original exception of a stage.
        """
        self._row_shares = []
        try:
            self._schedule.step(
                # torch 2.11 compares strides with those of the given shapes. No copy if they already match.
                *((tokens.contiguous(),) if self._owns_first else ()),
                **keys,
                target=keys["labels"] if self.owns_last else None,
                return_outputs=False,
            )
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            # torch wraps a stage's exception in a RuntimeError whose text does not name the cause.
            raise error.__cause__ from None
        return torch.cat(self._row_shares) if self.owns_last else torch.zeros(len(tokens), device=self._device)

    def row_losses(self, tokens: Tensor, **keys: Tensor) -> Tensor:
        """Summed loss of each row, (rows,), without backward; 0 except on the ranks of the last stage.

        keys: see forward_backward. Does not use the schedule, which would keep what backward needs: stages
        compute and send one microbatch after the other.
        """
        microbatches, *values = (value.split(self._microbatch_size) for value in (tokens, *keys.values()))
        inputs = {(0, index): microbatch for index, microbatch in enumerate(microbatches)}
        losses = []
        for computed in forward_timetable(self._owners, len(microbatches)):
            for stage, index in computed:
                if stage not in self._parts:
                    continue
                arguments = {key: value[index] for key, value in zip(keys, values, strict=True)}
                out = self._parts[stage](inputs.pop((stage, index)), **arguments)
                if stage + 1 < len(self._owners):
                    inputs[stage + 1, index] = out
                else:
                    losses.append(out)
            self._send_outputs(inputs, computed, [microbatch.shape for microbatch in microbatches])
        return torch.cat(losses) if losses else torch.zeros(len(tokens), device=self._device)

    def _send_outputs(
        self, inputs: dict[tuple[int, int], Tensor], computed: Sequence[tuple[int, int]], shapes: Sequence[torch.Size]
    ) -> None:
        """Send the outputs of stages to the ranks of the next stages, and receive those for this rank's stages.

        inputs: this rank's inputs by (stage, microbatch), updated in place. computed: the (stage, microbatch) pairs
        whose outputs to send, on all ranks. shapes: of the tokens of each microbatch: those of a validation may differ
        from those of the schedule.
        """
        rank, messages = self._group.rank(), []
        for stage, index in computed:
            sender, *receiver = self._owners[stage : stage + 2]
            if not receiver or receiver[0] == sender:
                continue
            if rank == sender:
                sent = inputs.pop((stage + 1, index)).contiguous()
                messages.append(dist.P2POp(dist.isend, sent, group=self._group, group_peer=receiver[0]))
            elif rank == receiver[0]:
                rows, positions = shapes[index]
                shape = rows, positions // self._tp, self._boundary.shape[-1]
                received = torch.empty(shape, dtype=self._boundary.dtype, device=self._device)
                messages.append(dist.P2POp(dist.irecv, received, group=self._group, group_peer=sender))
                inputs[stage + 1, index] = received
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()

    def _if_reducing(self, reduce: Callable[[int], None]) -> Callable[[int], None]:
        return lambda factor: reduce(factor) if self.reduces else None

    def _keep_shares(self, shares: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG002
        """Return the microbatch's share of the loss, a scalar, and keep the shares of its rows. The schedule calls this
        for one microbatch after the other, in order."""
        self._row_shares.append(shares.detach())
        return shares.sum()


class SharedParameters:
    """The parameters of this rank that other pipeline stages share, such as tied embeddings: their ranks have copies.

    Copies start equal, get the same gradient, the sum of those of all stages, and are updated alike. Stages on the same
    rank have one parameter. A collective over `group`, the ranks of the pp axis.
    """

    def __init__(self, model_parts: Sequence[LanguageModel], group: dist.ProcessGroup) -> None:
        self._group = group
        parameters, holders = parameters_of(model_parts), holders_in(model_parts)
        self._copied = [(parameters[name], ranks) for name, ranks in holders.items() if len(ranks) > 1]

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Replace each gradient by the sum of those of all copies: the same bits on all ranks. Sends each gradient to
        each of the others, in the dtype of the parameter; adds them in at least float32."""
        for parameter, ranks in self._copied:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own = local_part(parameter.grad)
            first, *others = exchanged(own, ranks, self._group)
            total = first.to(torch.promote_types(own.dtype, torch.float32), copy=True)
            for each in others:
                total += each
            own.copy_(total)


def holders_in(model_parts: Sequence[nn.Module]) -> dict[str, tuple[int, ...]]:
    """LanguageModel.holders of a rank's parts of the model."""
    return {name: ranks for part in model_parts for name, ranks in getattr(part, "holders", {}).items()}


def exchanged(own: Tensor, ranks: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    """The tensors of these ranks of the group, in their order. All of them call it, each with its own tensor."""
    own = own.contiguous()
    found = [own if rank == group.rank() else torch.empty_like(own) for rank in ranks]
    messages = [
        dist.P2POp(operation, tensor, group=group, group_peer=rank)
        for rank, received in zip(ranks, found, strict=True)
        if rank != group.rank() and own.numel()
        for operation, tensor in ((dist.isend, own), (dist.irecv, received))
    ]
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()
    return found


def share_between(model_parts: Sequence[LanguageModel]) -> None:
    """Make parameters that stages of this rank share one parameter. Call it when memory is allocated."""
    first: dict[str, tuple[LanguageModel, str]] = {}
    for part in model_parts:
        own_names = {name: own for own, name in part.first_names.items()}
        for name in part.holders:
            own = own_names.get(name, name)
            if name in first:
                share_parameter(*first[name], part, own)
                part.tie_weights()  # a stage may have it under several names
            first.setdefault(name, (part, own))
