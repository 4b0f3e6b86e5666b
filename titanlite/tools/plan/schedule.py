"""The order in which a rank works through microbatches, and what follows from it: idle time, memory, gathers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class

from titanlite.parallel.mesh import ParallelismConfig
from titanlite.parallel.pipeline import local_stages, num_stages

Kind = Literal["forward", "backward", "input_gradient", "weight_gradient", "gather", "free"]

# What torch's schedules call them; sends, receives and reductions are left out.
_KINDS: dict[str, Kind] = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "input_gradient",
    "BACKWARD_WEIGHT": "weight_gradient",
    "UNSHARD": "gather",
    "RESHARD": "free",
}
DURATION: dict[Kind, int] = {"forward": 1, "backward": 2, "input_gradient": 1, "weight_gradient": 1}
"""The usual unit of time: input gradients and weight gradients cost as much as the forward pass, each."""


class Action(NamedTuple):
    """One thing that a rank does with one of its stages. microbatch: -1 for gather and free."""

    kind: Kind
    stage: int
    microbatch: int


def schedule_order(section: ParallelismConfig, num_microbatches: int) -> list[list[Action]]:
    """What each rank of the pp axis does in one schedule step, in order; without a pipeline: forward, backward, ...

    Schedules of several stages are asked of torch, with the gathers that its runtime adds. num_microbatches: one that
    check_pipeline accepts.
    """
    if section.pp == 1:
        return [one_stage_order(0, 0, num_microbatches)]
    if section.pp_schedule in ("GPipe", "1F1B"):
        gpipe = section.pp_schedule == "GPipe"
        ahead = [num_microbatches if gpipe else section.pp - 1 - rank for rank in range(section.pp)]
        return [one_stage_order(rank, count, num_microbatches) for rank, count in enumerate(ahead)]
    stages = [
        # All that a schedule reads of a stage before it runs.
        SimpleNamespace(
            stage_index=index,
            num_stages=num_stages(section),
            group_size=section.pp,
            group_rank=0,
            submod=nn.Identity(),
        )
        for index in local_stages(section, 0)
    ]
    schedule: Any = get_schedule_class(section.pp_schedule)(stages, num_microbatches, scale_grads=False)
    return [list(_flat(schedule.pipeline_order_with_comms[rank])) for rank in range(section.pp)]


def one_stage_order(stage: int, ahead: int, num_microbatches: int) -> list[Action]:
    """One forward, one backward, after up to `ahead` forward passes: Narayanan et al., "PipeDream" (2019)."""
    ahead = min(ahead, num_microbatches)
    actions = [Action("forward", stage, index) for index in range(ahead)]
    for index in range(ahead, num_microbatches):
        actions += [Action("forward", stage, index), Action("backward", stage, index - ahead)]
    return actions + [Action("backward", stage, index) for index in range(num_microbatches - ahead, num_microbatches)]


def _flat(actions: Iterable[Any]) -> Iterable[Action]:
    """Pairs that a schedule calls overlapping are run one after the other by torch's runtime."""
    for action in actions:
        if action.sub_actions is not None:
            yield from _flat(action.sub_actions)
        elif action.computation_type.name in _KINDS:
            index = -1 if action.microbatch_index is None else action.microbatch_index
            yield Action(_KINDS[action.computation_type.name], action.stage_index, index)


def bubble_share(section: ParallelismConfig, num_microbatches: int) -> float:
    """Share of a schedule step's time in which a rank waits, for stages of equal cost and free communication.

    With p ranks, m microbatches and v stages per rank: (p - 1) / (v m + p - 1), the bubble over all of the time, for
    GPipe and 1F1B (v = 1), LoopedBFS and Interleaved1F1B: Narayanan et al., "Efficient Large-Scale Language Model
    Training on GPU Clusters Using Megatron-LM" (2021), section 2.2. The others split the backward pass (Qi et al.,
    "Zero Bubble Pipeline Parallelism", 2023; Liu et al., "DeepSeek-V3", 2024): theirs is simulated.
    """
    if section.pp == 1:
        return 0.0
    if section.pp_schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        return simulated_bubble_share(schedule_order(section, num_microbatches), num_stages(section))
    v = num_stages(section) // section.pp
    return (section.pp - 1) / (v * num_microbatches + section.pp - 1)


def simulated_bubble_share(order: Sequence[Sequence[Action]], stages: int) -> float:
    """As bubble_share, by running the order: each action starts once its rank is free and its inputs are there.

    Durations: DURATION, per stage. A rank's own first wait and last one count.
    """
    queues = [[action for action in actions if action.kind in DURATION] for actions in order]
    end: dict[tuple[str, int, int], int] = {}
    clocks, position = [0] * len(queues), [0] * len(queues)
    while any(position[rank] < len(queue) for rank, queue in enumerate(queues)):
        moved = False
        for rank, queue in enumerate(queues):
            while position[rank] < len(queue):
                action = queue[position[rank]]
                inputs = _inputs(action, stages)
                if any(key not in end for key in inputs):
                    break
                start = max([clocks[rank], *(end[key] for key in inputs)])
                clocks[rank] = start + DURATION[action.kind]
                end[_result(action), action.stage, action.microbatch] = clocks[rank]
                position[rank] += 1
                moved = True
        assert moved, "the schedule waits for itself"
    busy = sum(DURATION[action.kind] for queue in queues for action in queue)
    return 1.0 - busy / (len(queues) * max(clocks))


def _result(action: Action) -> str:
    """A whole backward pass gives the input's gradient, too."""
    return "input_gradient" if action.kind == "backward" else action.kind


def _inputs(action: Action, stages: int) -> list[tuple[str, int, int]]:
    """What must be done before, by whom: (result, stage, microbatch)."""
    stage, index = action.stage, action.microbatch
    if action.kind == "forward":
        return [("forward", stage - 1, index)] if stage > 0 else []
    if action.kind == "weight_gradient":
        return [("input_gradient", stage, index)]
    own = ("forward", stage, index)
    return [own, ("input_gradient", stage + 1, index)] if stage < stages - 1 else [own]


def peak_in_flight(actions: Iterable[Action], bytes_per_microbatch: Callable[[int], int]) -> tuple[int, dict[int, int]]:
    """(most bytes that microbatches between forward and backward take at once, how many of each stage these are).

    bytes_per_microbatch(stage). With a split backward pass a microbatch is held until its weight gradients are there:
    an upper bound, since input gradients free a part of it.
    """
    held: dict[int, int] = {}
    most, at_most = 0, dict[int, int]()
    for action in actions:
        if action.kind == "forward":
            held[action.stage] = held.get(action.stage, 0) + 1
            total = sum(bytes_per_microbatch(stage) * count for stage, count in held.items())
            if total > most:
                most, at_most = total, dict(held)
        elif action.kind in ("backward", "weight_gradient"):
            held[action.stage] -= 1
    return most, at_most


def count_gathers(
    actions: Iterable[Action], stage: int, *, frees_after_forward: bool, frees_after_backward: Mapping[int, bool]
) -> int:
    """How often a unit of that stage is gathered in one run through the actions, which ends with it freed.

    frees_after_backward: by microbatch; missing: not.
    """
    gathered, count = False, 0
    for action in actions:
        if action.stage != stage or action.kind == "weight_gradient":
            continue  # weight gradients need activations only
        if action.kind == "free":
            gathered = False
            continue
        count += not gathered
        forward = action.kind == "forward"
        gathered = not (frees_after_forward if forward else frees_after_backward.get(action.microbatch))
    return count
