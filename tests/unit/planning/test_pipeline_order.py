"""Orders of pipeline schedules: idle time compared with published formulas, memory in flight, gathers."""

from types import SimpleNamespace

import pytest
from torch import nn

from titanlite.parallel.mesh import ParallelismConfig, PipelineSchedule
from titanlite.parallel.pipeline import SCHEDULES, local_stages, num_stages, schedule_class
from titanlite.planning.pipeline_order import (
    Action,
    Actions,
    bubble_share,
    count_gathers,
    one_stage_order,
    peak_in_flight,
    schedule_order,
)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8), (4, 16), pytest.param(8, 32, marks=pytest.mark.slow)])
def test_simulating_the_order_gives_the_formula(name: PipelineSchedule, pp: int, microbatches: int) -> None:
    section = ParallelismConfig(pp=pp, pp_schedule=name)
    stages = num_stages(section)
    order = schedule_order(section, microbatches)
    for rank, actions in enumerate(order):
        done = [action for action in actions if action.kind in ("backward", "input_gradient")]
        owned = {rank, stages - 1 - rank} if SCHEDULES[name].placement == "v" else {rank, rank + stages - pp}
        assert {(a.stage, a.microbatch) for a in done} == {(s, m) for s in owned for m in range(microbatches)}
    # Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021), section 2.2.
    # With a split backward pass, weight gradients fill all gaps but those of the first and last forward passes.
    busy = 6 * microbatches if SCHEDULES[name].splits_backward else stages // pp * microbatches
    assert bubble_share(order, stages) == pytest.approx((pp - 1) / (busy + pp - 1))
    (last,) = (actions for actions in order if stages - 1 in actions.stages)
    kept = [0]
    for action in last:
        if action.stage == stages - 1:
            kept.append(kept[-1] + {"forward": 1, "backward": -1, "weight_gradient": -1}.get(action.kind, 0))
    assert (max(kept) > 1) == SCHEDULES[name].keeps_last


@pytest.mark.parametrize("name", [name for name, shape in SCHEDULES.items() if shape.stages_per_rank > 1])
def test_the_order_is_that_of_torchs_runtime(name: PipelineSchedule) -> None:
    section = ParallelismConfig(pp=4, pp_schedule=name)
    own = [
        SimpleNamespace(stage_index=index, num_stages=8, group_size=4, group_rank=0, submod=nn.Identity())
        for index in local_stages(section, 0)
    ]
    runtime = schedule_class(name)(own, 8, scale_grads=False)
    kinds = {
        "FORWARD": "forward",
        "FULL_BACKWARD": "backward",
        "BACKWARD_INPUT": "input_gradient",
        "BACKWARD_WEIGHT": "weight_gradient",
        "UNSHARD": "gather",
    }
    for rank, order in enumerate(schedule_order(section, 8)):
        actions = [part for each in runtime.pipeline_order_with_comms[rank] for part in each.sub_actions or [each]]
        known = [action for action in actions if action.computation_type.name in kinds]
        assert [(kinds[each.computation_type.name], each.stage_index) for each in known] == [each[:2] for each in order]
        numbers = [-1 if each.microbatch_index is None else each.microbatch_index for each in known]
        assert numbers == [action.microbatch for action in order]


def test_without_a_pipeline_there_is_no_idle_time() -> None:
    order = schedule_order(ParallelismConfig(), 2)
    assert order == [one_stage_order(0, 0, 2)]
    assert bubble_share(order, 1) == 0.0


@pytest.mark.parametrize(("name", "expected", "gradients"), [("GPipe", [8, 8, 8, 8], 0), ("1F1B", [4, 3, 2, 1], 7)])
def test_microbatches_in_flight(name: PipelineSchedule, expected: list[int], gradients: int) -> None:
    """With GPipe, all of them are before the first gradients."""
    order = schedule_order(ParallelismConfig(pp=4, pp_schedule=name), 8)
    assert [peak_in_flight(actions, lambda _: 10, lambda _: 7) for actions in order] == [
        (10 * count, gradients, {rank: count}) for rank, count in enumerate(expected)
    ]


def test_the_peak_is_the_maximum_of_bytes_not_of_microbatches() -> None:
    """Also of gradients: those of a stage exist between its first and its last backward pass."""
    order = [Action("forward", 0, 0), Action("forward", 0, 1), Action("backward", 0, 0), Action("forward", 1, 0)]
    order += [Action("input_gradient", 1, 0), Action("weight_gradient", 1, 0), Action("backward", 0, 1)]
    actions = Actions(order)
    kept, gradients, split = [1, 5], [2, 9], [0, 3]
    arguments = kept.__getitem__, gradients.__getitem__
    assert peak_in_flight(actions, *arguments) == (6, 2, {0: 1, 1: 1})
    assert peak_in_flight(actions, *arguments, split.__getitem__) == (9, 2, {0: 1, 1: 1})


@pytest.mark.parametrize(
    ("frees_after_forward", "frees_after_backward", "gathers"),
    [(True, {0: True, 1: True}, 4), (True, {1: True}, 3), (False, {0: True, 1: True}, 2), (False, {1: True}, 1)],
)
def test_gathers_by_policy(frees_after_forward: bool, frees_after_backward: dict[int, bool], gathers: int) -> None:
    order = one_stage_order(0, 0, 2)
    found = count_gathers(order, 0, frees_after_forward=frees_after_forward, frees_after_backward=frees_after_backward)
    assert found == gathers
    assert count_gathers(order, 1, frees_after_forward=True, frees_after_backward={}) == 0
