"""Pipeline parallelism: which units a stage keeps, and the schedule that runs the stages."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from titanlite.batch import Batch
from titanlite.models.family import Plan
from titanlite.parallel.compile import can_split_compiled_backward
from titanlite.parallel.mesh import ParallelismConfig, PipelineSchedule, ReshardAfterForward
from titanlite.runtime.errors import Problem, require


@dataclass(frozen=True)
class ScheduleShape:
    """stages_per_rank: stages on each rank. placement: where they are, for rank p of P and its two stages:
    loop: p and P + p; v: p and 2P - 1 - p. splits_backward: input gradients are computed apart from weight gradients.
    """

    stages_per_rank: Literal[1, 2]
    placement: Literal["loop", "v"] = "loop"
    splits_backward: bool = False


SCHEDULES: dict[PipelineSchedule, ScheduleShape] = {
    "GPipe": ScheduleShape(1),
    "1F1B": ScheduleShape(1),
    "LoopedBFS": ScheduleShape(2),
    "Interleaved1F1B": ScheduleShape(2),
    "InterleavedZeroBubble": ScheduleShape(2, splits_backward=True),
    "ZBVZeroBubble": ScheduleShape(2, "v", splits_backward=True),
    "DualPipeV": ScheduleShape(2, "v", splits_backward=True),
}


def num_stages(section: ParallelismConfig) -> int:
    """Stages of the whole pipeline; 1 without one."""
    return section.pp * SCHEDULES[section.pp_schedule].stages_per_rank if section.pp > 1 else 1


def splits_backward(section: ParallelismConfig) -> bool:
    """Whether there is a pipeline that computes gradients of weights apart from those of inputs."""
    return section.pp > 1 and SCHEDULES[section.pp_schedule].splits_backward


def local_stages(section: ParallelismConfig, pp_rank: int) -> list[int]:
    """Indexes of the stages that a rank of the pp axis owns, ascending."""
    if section.pp == 1:
        return [0]
    shape = SCHEDULES[section.pp_schedule]
    if shape.stages_per_rank == 1:
        return [pp_rank]
    return [pp_rank, 2 * section.pp - 1 - pp_rank if shape.placement == "v" else section.pp + pp_rank]


def stage_owners(section: ParallelismConfig) -> list[int]:
    """The rank on the pp axis of each stage."""
    owners = {stage: rank for rank in range(section.pp) for stage in local_stages(section, rank)}
    return [owners[stage] for stage in range(num_stages(section))]


def forward_timetable(owners: Sequence[int], num_microbatches: int) -> list[list[tuple[int, int]]]:
    """For each point in time what is computed at it, (stage, microbatch); of a forward pass alone.

    owners: as of stage_owners. A rank computes one thing at a time, a microbatch goes through the stages in order.
    """
    begins: list[int] = []
    for stage, owner in enumerate(owners):
        free = [begins[other] + num_microbatches for other in range(stage) if owners[other] == owner]
        begins.append(max([0, *(begin + 1 for begin in begins[-1:]), *free]))
    return [
        [(stage, time - begin) for stage, begin in enumerate(begins) if 0 <= time - begin < num_microbatches]
        for time in range(begins[-1] + num_microbatches)
    ]


def rows_per_batch(section: ParallelismConfig, local_batch_size: int, rows_per_step: int) -> int:
    """Sequences that a data rank computes gradients of at once, of its `rows_per_step` in an optimizer step.

    Stages reduce their gradients at the end of each batch: with gradient_sync "every" that is a local batch, else a
    pipeline gets all of the step.
    """
    return local_batch_size if section.pp == 1 or section.gradient_sync == "every" else rows_per_step


def resolve_reshard_after_forward(section: ParallelismConfig) -> ReshardAfterForward:
    """The policy for sharded parameters; with a split backward pass "default" is "never".

    torch notes which weights the second half has to compute when the first half begins. Those of a unit that is freed
    then are not gathered yet: it would not find them, and leave out their gradients without a word.
    """
    return "never" if splits_backward(section) else section.fsdp_reshard_after_forward


def check_pipeline(section: ParallelismConfig, plan: Plan, rows: int, *, document_mask: bool = False) -> list[Problem]:
    """What is wrong with the pp_... keys for a model of that plan. Without a pipeline they are without effect.

    rows: sequences that go through the pipeline at once, 0 where they are not known. document_mask: whether every stage
    gets the positions of its rows.
    """
    key = "parallelism"
    if section.pp <= 1:
        return []
    stages = num_stages(section)
    cuts = [unit[0] for unit in plan.units[1:]]
    problems = require(
        stages <= len(plan.units),
        f"{key}.pp",
        section.pp,
        f"{section.pp_schedule} makes {stages} stages of it, and the model has {len(plan.units)} units to put on them",
        "fewer stages (a smaller pp, or a schedule with one stage per rank: 1F1B, GPipe), or more model.n_layers",
    )
    problems += require(
        SCHEDULES[section.pp_schedule].placement != "v" or torch.__version__ >= "2.12",
        f"{key}.pp_schedule",
        section.pp_schedule,
        f"needs torch 2.12 or newer, and this is {torch.__version__}: older ones connect a rank with itself for it",
        "another schedule, such as Interleaved1F1B, or a newer torch",
    )
    problems += require(
        not (document_mask and splits_backward(section)) or can_split_compiled_backward(),
        f"{key}.pp_schedule",
        section.pp_schedule,
        f"with data.document_mask it needs torch 2.13 or newer, and this is {torch.__version__}: older ones cannot "
        "split the backward pass of FlexAttention, which is compiled, or ask for gradients of positions there",
        "another schedule, such as Interleaved1F1B, or a newer torch",
    )
    problems += require(
        not (splits_backward(section) and section.dp_shard != 1 and section.fsdp_reshard_after_forward == "always"),
        f"{key}.fsdp_reshard_after_forward",
        section.fsdp_reshard_after_forward,
        f"not with {section.pp_schedule}, which computes gradients of weights later: torch loses those of freed units",
        'write "default" or "never", which keep the parameters of a stage gathered, or use another pp_schedule',
    )
    given = list(section.pp_split)
    unknown = [name for name in given if name not in cuts]
    problems += require(
        not unknown,
        f"{key}.pp_split",
        given,
        f"names at which a stage may begin, and {', '.join(unknown)} is none",
        f"names among {_shortened(cuts)}",
    )
    if given and not unknown:
        problems += require(
            len(given) == stages - 1 and given == [name for name in cuts if name in given],
            f"{key}.pp_split",
            given,
            f"{stages - 1} different names in the model's order, for the {stages} stages of "
            f"{section.pp_schedule} on pp = {section.pp}",
            f"name the first module of each stage but the first, or leave {key}.pp_split out",
        )
    return problems + _check_microbatches(section, rows)


def _check_microbatches(section: ParallelismConfig, rows: int) -> list[Problem]:
    key, size = "parallelism", section.pp_microbatch_size
    if size < 1:
        return require(False, f"{key}.pp_microbatch_size", size, "at least 1", "1 is the usual value")
    if rows < 1:
        return []
    of = "training.local_batch_size" if section.gradient_sync == "every" else "training.global_batch_size / data degree"
    if rows % size:
        return require(
            False,
            f"{key}.pp_microbatch_size",
            size,
            f"divides {of} = {rows}, the sequences that go through the pipeline at once",
            f"{key}.pp_microbatch_size = {max(n for n in range(1, size) if rows % n == 0)}",
        )
    found = rows // size
    needed = fewest_microbatches(section)
    if found < needed:
        return require(
            False,
            f"{key}.pp_schedule",
            section.pp_schedule,
            f"at least {needed} microbatches on pp = {section.pp}, and {of} = {rows} in microbatches of {size} makes "
            f"{found}",
            f"a larger batch (training.global_batch_size, or training.local_batch_size), or a smaller {key}.pp or "
            f"{key}.pp_microbatch_size",
        )
    if section.pp_schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        rounds = max(1, found // section.pp)
        return require(
            found % rounds == 0,
            f"{key}.pp_schedule",
            section.pp_schedule,
            f"the number of microbatches ({found}) is a multiple of its rounds ({found} // pp = {rounds})",
            f"a multiple of pp = {section.pp} always fits: {rows - rows % (size * section.pp)} sequences instead of "
            f"{rows} ({of})",
        )
    return []


def fewest_microbatches(section: ParallelismConfig) -> int:
    """What the schedule needs to run at all; with fewer than pp every schedule leaves ranks idle most of the time."""
    return {"1F1B": section.pp, "DualPipeV": 2 * section.pp}.get(section.pp_schedule, 1)


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 6 else [*names[:3], "…", *names[-2:]])


def assign_units(costs: Sequence[int], cuts: Sequence[int], stages: int) -> list[range]:
    """The units of each stage: contiguous, none without one.

    cuts: indexes of the units at which stages begin, but for the first; empty: chosen so that the costliest stage is
    as cheap as can be, and among those splits the one with the smallest sum of squared stage costs.
    """
    if not cuts:
        cuts = _balanced_cuts(costs, stages)
    starts = [0, *cuts, len(costs)]
    return [range(start, end) for start, end in pairwise(starts)]


def _balanced_cuts(costs: Sequence[int], stages: int) -> list[int]:
    totals = [0, *accumulate(costs)]
    cheapest, _ = _best_split(totals, stages, lambda so_far, cost: max(so_far, cost))
    _, starts = _best_split(totals, stages, lambda so_far, cost: so_far + cost * cost if cost <= cheapest else math.inf)
    return starts[1:]


def _best_split(totals: Sequence[int], stages: int, combine: Callable[[float, int], float]) -> tuple[float, list[int]]:
    """(value, first unit of each stage) of the split with the smallest value, which `combine` makes of a stage's cost
    and the value of the stages before it. totals: cost of all units before each one."""
    best: list[tuple[float, list[int]]] = [(0, []), *[(math.inf, [])] * (len(totals) - 1)]
    for _ in range(stages):
        best = [
            min(
                (
                    (combine(best[start][0], totals[end] - totals[start]), [*best[start][1], start])
                    for start in range(end)
                    if best[start][0] < math.inf
                ),
                default=(math.inf, []),
            )
            for end in range(len(totals))
        ]
    return best[-1]


def unit_costs(model: nn.Module, plan: Plan) -> list[int]:
    """Parameters of each unit: what it holds in memory, and, but for the embedding, what it computes with."""
    return [
        sum(parameter.numel() for name in unit for parameter in model.get_submodule(name).parameters())
        for unit in plan.units
    ]


def split_stages(model: nn.Module, plan: Plan, section: ParallelismConfig) -> list[range]:
    """The units of each stage of the whole model: as pp_split says, else with costs as even as can be."""
    names = [unit[0] for unit in plan.units]
    cuts = [names.index(name) for name in section.pp_split]
    return assign_units(unit_costs(model, plan), cuts, num_stages(section))


def describe_stages(plan: Plan, stages: Sequence[range]) -> str:
    """First and last module of each stage, for the start log."""
    ends = [(plan.units[units[0]][0], plan.units[units[-1]][-1]) for units in stages]
    return " | ".join(first if first == last else f"{first} to {last}" for first, last in ends)


def keep_units_(model: nn.Module, plan: Plan, kept: range) -> Plan:
    """Removes all units but the `kept` ones from the model, in place; returns the plan of what is left."""
    for index, unit in enumerate(plan.units):
        for name in unit if index not in kept else ():
            parent, _, leaf = name.rpartition(".")
            owner = model.get_submodule(parent)
            if isinstance(owner, nn.ModuleDict):
                del owner[leaf]
            else:
                setattr(owner, leaf, None)
    units = tuple(plan.units[index] for index in kept)
    names = {name for unit in units for name in unit}
    return replace(plan, units=units, blocks={name: index for name, index in plan.blocks.items() if name in names})


@dataclass(frozen=True)
class StageShapes:
    """Of one microbatch on one rank. boundary: what a stage hands to the next, (microbatch, seq_len / tp, dim), in
    `dtype`. tokens: (microbatch, seq_len). logits: (microbatch, seq_len, vocabulary)."""

    tokens: tuple[int, int]
    boundary: tuple[int, int, int]
    logits: tuple[int, int, int]
    dtype: torch.dtype

    @staticmethod
    def of_microbatch(
        section: ParallelismConfig, *, seq_len: int, dim: int, vocab_size: int, dtype: torch.dtype
    ) -> "StageShapes":
        """For a model of that width and vocabulary, computing in `dtype`."""
        rows = section.pp_microbatch_size
        return StageShapes((rows, seq_len), (rows, seq_len // section.tp, dim), (rows, seq_len, vocab_size), dtype)


class Pipeline:
    """The stages of this rank and their schedule, for forward and backward passes of whole batches.

    Mesh axis: pp. Stages reduce their gradients over the data axes once, at the end of each schedule step.
    """

    def __init__(
        self,
        model_parts: Sequence[nn.Module],
        section: ParallelismConfig,
        mesh: DeviceMesh,
        device: torch.device,
        *,
        shapes: StageShapes,
        num_microbatches: int,
        loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> None:
        """loss(logits, labels, num_valid): what each row of a microbatch adds to the mean loss."""
        indexes = local_stages(section, mesh["pp"].get_local_rank())
        last = num_stages(section) - 1
        stages = [
            PipelineStage(
                part,
                index,
                last + 1,
                device,
                # Given, not inferred: inference runs the model once more than the step says, and clears gradients.
                input_args=_meta(shapes.tokens, torch.int64) if index == 0 else _meta(shapes.boundary, shapes.dtype),
                output_args=_meta(shapes.logits if index == last else shapes.boundary, shapes.dtype),
                group=mesh.get_group("pp"),
            )
            for part, index in zip(model_parts, indexes, strict=True)
        ]
        self._device = device
        self._parts = dict(zip(indexes, model_parts, strict=True))
        self._owners = stage_owners(section)
        self._group = mesh.get_group("pp")
        self._shapes = shapes
        self._owns_first = 0 in indexes
        self.owns_last = last in indexes
        """Whether this rank has the last stage, and so the losses."""
        self._row_shares: list[Tensor] = []
        self._loss = loss
        self._num_valid = torch.ones((), dtype=torch.int64, device=device)
        shape = SCHEDULES[section.pp_schedule]
        if splits_backward(section):
            # Compiled backward passes would free buffers that the second half of a split backward still needs.
            torch._functorch.config.donated_buffer = False
        schedule = get_schedule_class(section.pp_schedule)
        self._schedule = schedule(
            stages if shape.stages_per_rank > 1 else stages[0],
            n_microbatches=num_microbatches,
            loss_fn=self._microbatch_share,
            scale_grads=False,  # the loss is divided already, by the valid tokens of the whole global batch
        )

    def forward_backward(self, batch: Batch, num_valid: Tensor, **keys: Tensor) -> Tensor:
        """Adds the batch's share of the mean loss's gradient to the parameters of all stages; returns the rows' shares.

        keys: more arguments of every stage's forward, one row for each row of the batch. The shares, (rows,), are known
        on the last stage's ranks, and 0 on all others. An error in a stage is raised as it is.
        """
        self._num_valid = num_valid
        self._row_shares = []
        try:
            self._schedule.step(
                # torch 2.11 compares strides with those of the given shapes; a batch that has them is not copied.
                *((batch.tokens.contiguous(),) if self._owns_first else ()),
                **keys,
                target=batch.labels if self.owns_last else None,
                return_outputs=False,
            )
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            # torch wraps what a stage raises into an error of its own, whose text does not say what it was.
            raise error.__cause__ from None
        return torch.cat(self._row_shares) if self.owns_last else torch.zeros(len(batch.labels), device=self._device)

    def row_losses(self, batch: Batch, **keys: Tensor) -> Tensor:
        """The sum of the cross-entropy of each row, (rows,), on the last stage's ranks, and 0 on all others.

        keys: as of forward_backward. Without the schedule, which would keep the logits of all microbatches: stages
        compute and hand on one microbatch after the other.
        """
        rows = self._shapes.tokens[0]
        parts = [value.split(rows) for value in (batch.tokens, batch.labels, *keys.values())]
        tokens, labels, *values = parts
        self._num_valid = torch.ones((), dtype=torch.int64, device=self._device)
        inputs = {(0, index): microbatch for index, microbatch in enumerate(tokens)}
        losses = []
        for computed in forward_timetable(self._owners, len(tokens)):
            for stage, index in computed:
                if stage not in self._parts:
                    continue
                arguments = {key: value[index] for key, value in zip(keys, values, strict=True)}
                out = self._parts[stage](inputs.pop((stage, index)), **arguments)
                if stage + 1 < len(self._owners):
                    inputs[stage + 1, index] = out
                else:
                    losses.append(self._loss(out, labels[index], self._num_valid))
            self._hand_on(inputs, computed)
        return torch.cat(losses) if losses else torch.zeros(len(batch.labels), device=self._device)

    def _hand_on(self, inputs: dict[tuple[int, int], Tensor], computed: Sequence[tuple[int, int]]) -> None:
        """Between the ranks of neighbouring stages. inputs: by (stage, microbatch), on this rank, before and after.

        computed: the (stage, microbatch) whose outputs are due, on all ranks.
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
                received = torch.empty(self._shapes.boundary, dtype=self._shapes.dtype, device=self._device)
                messages.append(dist.P2POp(dist.irecv, received, group=self._group, group_peer=sender))
                inputs[stage + 1, index] = received
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()

    def _microbatch_share(self, logits: Tensor, labels: Tensor) -> Tensor:
        """What the schedule computes gradients of. It calls this for one microbatch after the other, in their order."""
        shares = self._loss(logits, labels, self._num_valid)
        self._row_shares.append(shares.detach())
        return shares.sum()


def _meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)
