"""Pipeline schedules: the order of a rank's actions, and the resulting idle time, activation memory and gathers."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from torch import nn

from titanlite.parallel.mesh import ParallelismConfig, PipelineSchedule
from titanlite.parallel.pipeline import local_stages, num_stages, schedule_class

Kind = Literal["forward", "backward", "input_gradient", "weight_gradient", "gather"]

# The names in torch's schedules.
_KINDS: dict[str, Kind] = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "input_gradient",
    "BACKWARD_WEIGHT": "weight_gradient",
}
DURATION: dict[Kind, int] = {"forward": 1, "backward": 2, "input_gradient": 1, "weight_gradient": 1}
"""In units of a forward pass. Input gradients and weight gradients cost one forward pass each."""


class Action(NamedTuple):
    """One action of a rank on one of its stages. microbatch: -1 for gather."""

    kind: Kind
    stage: int
    microbatch: int


class InFlight(NamedTuple):
    """What a rank has at a moment. By stage: held, the microbatches between forward and backward; split, those of them
    whose gradients wait for those of weights. reduced: the stages with gradients."""

    held: Mapping[int, int]
    split: Mapping[int, int]
    reduced: frozenset[int]


class Actions(tuple[Action, ...]):
    """The actions of a rank in their order."""

    @cached_property
    def stages(self) -> frozenset[int]:
        """The stages of the rank."""
        return frozenset(action.stage for action in self)

    @cached_property
    def peaks(self) -> Sequence[InFlight]:
        """The moments at which a rank may have most: after an action that adds something, and before one that frees
        something. Equal ones once.

        A stage has gradients from its first backward pass until its last, at whose end it reduces them. With a split
        backward pass a microbatch counts until its weight gradients are done.
        """
        left = Counter(stage for kind, stage, _ in self if kind in ("backward", "weight_gradient"))
        held, split, waiting, reduced = dict[int, int](), Counter[int](), set[tuple[int, int]](), set[int]()
        found: dict[Any, InFlight] = {}
        end = Action("backward", -1, -1)
        for (kind, stage, index), following in pairwise((*self, end)):
            if kind == "gather":
                continue
            adds = True
            if kind == "forward":
                held[stage] = held.get(stage, 0) + 1
            elif kind == "input_gradient":
                split[stage] += 1
                waiting.add((stage, index))
            else:
                held[stage] -= 1
                split[stage] -= (stage, index) in waiting
                adds = stage not in reduced
                reduced.add(stage)
                left[stage] -= 1
            if adds and following.kind not in ("forward", "input_gradient"):
                now = InFlight(dict(held), dict(split), frozenset(stage for stage in reduced if left[stage]))
                found.setdefault((tuple(held.items()), tuple(split.items()), now.reduced), now)
        return tuple(found.values())


def schedule_order(section: ParallelismConfig, num_microbatches: int) -> list[Actions]:
    """The ordered actions of each pipeline rank in one schedule step; without a pipeline: forward, backward, ...

    Orders of schedules with several stages per rank come from torch, including the gathers that its runtime adds.
    num_microbatches: must pass check_pipeline.
    """
    return list(_order(section.pp, section.pp_schedule if section.pp > 1 else "1F1B", num_microbatches))


@lru_cache(maxsize=256)  # torch's schedules take seconds to build for many stages and microbatches
def _order(pp: int, name: PipelineSchedule, num_microbatches: int) -> tuple[Actions, ...]:
    if name in ("GPipe", "1F1B"):
        ahead = [num_microbatches if name == "GPipe" else pp - 1 - rank for rank in range(pp)]
        return tuple(one_stage_order(rank, count, num_microbatches) for rank, count in enumerate(ahead))
    section = ParallelismConfig(pp=pp, pp_schedule=name)
    stages = [
        # the only attributes of a stage that a schedule reads before it runs
        SimpleNamespace(
            stage_index=index, num_stages=num_stages(section), group_size=section.pp, group_rank=0, submod=nn.Identity()
        )
        for index in local_stages(section, 0)
    ]
    # Without sends and receives, which take torch most of the time to place, and which nothing here needs.
    no_sends = {"_prepare_schedule_with_comms": lambda *_: None}
    schedule: Any = type(name, (schedule_class(name),), no_sends)(stages, num_microbatches, scale_grads=False)
    return tuple(_with_gathers(list(_flatten(schedule.pipeline_order[rank]))) for rank in range(pp))


def _with_gathers(actions: list[Action]) -> Actions:
    """Add the gathers of torch's runtime, which gathers the next three stages and frees the others: a rank has two."""
    stages = list(dict.fromkeys(action.stage for action in actions))
    return Actions([*(Action("gather", stage, -1) for stage in stages), *actions])


def one_stage_order(stage: int, ahead: int, num_microbatches: int) -> Actions:
    """The 1F1B order after up to `ahead` forward passes: Narayanan et al., "PipeDream" (2019)."""
    ahead = min(ahead, num_microbatches)
    actions = [Action("forward", stage, index) for index in range(ahead)]
    for index in range(ahead, num_microbatches):
        actions += [Action("forward", stage, index), Action("backward", stage, index - ahead)]
    last = (Action("backward", stage, index) for index in range(num_microbatches - ahead, num_microbatches))
    return Actions([*actions, *last])


def _flatten(actions: Iterable[Any]) -> Iterable[Action]:
    """Omit idle time, and split torch's OVERLAP_F_B actions (a forward and a backward pass) into their two parts,
    which torch's runtime executes one after the other."""
    for action in actions:
        if action is None:
            continue
        if action.sub_actions is not None:
            yield from _flatten(action.sub_actions)
        else:
            yield Action(_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)


def bubble_share(order: Sequence[Sequence[Action]], stages: int) -> float:
    """The fraction of a schedule step in which a rank is idle, for stages of equal cost and free communication.

    By simulation: each action takes DURATION, and starts when its rank is free and its inputs are complete. The idle
    time before a rank's first action and after its last one counts.
    """
    busy, end = simulate(order, stages, lambda action: DURATION[action.kind])
    return 1.0 - sum(busy) / (len(busy) * end)


def simulate(
    order: Sequence[Sequence[Action]],
    stages: int,
    duration: Callable[[Action], float],
    delay: Callable[[int, int], float] = lambda _first, _second: 0.0,
) -> tuple[list[float], float]:
    """(time that each rank works, time at which the last one has finished) of a schedule step.

    duration: of an action of DURATION. delay: of a message from one stage to another.
    """
    queues = [[action for action in actions if action.kind in DURATION] for actions in order]
    microbatches = 1 + max(action.microbatch for queue in queues for action in queue)
    # by stage and microbatch: when the input of its forward pass arrives, and when the gradient of its output does
    activations: list[list[float | None]] = [[0.0 if stage == 0 else None] * microbatches for stage in range(stages)]
    gradients: list[list[float | None]] = [
        [0.0 if stage == stages - 1 else None] * microbatches for stage in range(stages)
    ]
    clocks, busy, position = [0.0] * len(queues), [0.0] * len(queues), [0] * len(queues)
    left = sum(map(len, queues))
    while left:
        before = left
        for rank, queue in enumerate(queues):
            clock, worked, next_one = clocks[rank], busy[rank], position[rank]
            while next_one < len(queue):
                # what a rank has computed itself comes earlier in its own order
                action = queue[next_one]
                kind, stage, index = action
                if kind != "weight_gradient":
                    arrival = activations[stage][index] if kind == "forward" else gradients[stage][index]
                    if arrival is None:
                        break
                    if arrival > clock:
                        clock = arrival
                time = duration(action)
                clock += time
                worked += time
                if kind == "forward":
                    if stage < stages - 1:
                        activations[stage + 1][index] = clock + delay(stage, stage + 1)
                elif stage > 0 and kind != "weight_gradient":
                    gradients[stage - 1][index] = clock + delay(stage, stage - 1)
                next_one += 1
            left -= next_one - position[rank]
            clocks[rank], busy[rank], position[rank] = clock, worked, next_one
        assert left < before, "the schedule deadlocks"
    return busy, max(clocks)


def peak_in_flight(
    actions: Actions,
    bytes_per_microbatch: Callable[[int], int],
    gradient_bytes: Callable[[int], int],
    split_bytes: Callable[[int], int] = lambda _: 0,
) -> tuple[int, int, Mapping[int, int]]:
    """(bytes of the microbatches between forward and backward, bytes of gradients, number of these microbatches per
    stage), when the two sizes together are largest.

    The functions are called with the stage. split_bytes: what a microbatch needs more between its gradients of inputs
    and those of weights. See Actions.peaks.
    """
    most: tuple[int, int, Mapping[int, int]] = 0, 0, {}
    for held, split, reduced in actions.peaks:
        kept = sum(count * bytes_per_microbatch(stage) for stage, count in held.items())
        kept += sum(count * split_bytes(stage) for stage, count in split.items())
        gradients = sum(map(gradient_bytes, reduced))
        if kept + gradients > most[0] + most[1]:
            most = kept, gradients, held
    return most


def count_gathers(
    actions: Actions, stage: int, *, frees_after_forward: bool, frees_after_backward: Mapping[int, bool]
) -> int:
    """Number of gathers of one FSDP unit of the stage in one run of the actions. The unit starts and ends freed.

    frees_after_backward: by microbatch; False if missing.
    """
    if not (frees_after_forward or any(frees_after_backward.values())):
        return int(stage in actions.stages)  # it is not freed before the end
    gathered, count = False, 0
    for action in actions:
        if action.stage != stage or action.kind == "weight_gradient":
            continue  # weight gradients need activations only
        count += not gathered
        forward = action.kind == "forward"
        gathered = not (frees_after_forward if forward else frees_after_backward.get(action.microbatch))
    return count
