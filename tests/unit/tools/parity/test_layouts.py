"""The text form of layouts, and the choice of layouts."""

from math import prod
from typing import get_args

import pytest

from tests.configuration import EACH_SCHEDULE
from tests.distributed.layouts import EXPERTS
from tests.distributed.reference import small_config
from titanlite.parallel.mesh import PipelineSchedule
from titanlite.runtime.errors import Problem
from titanlite.tools.parity.layouts import Layout, candidate_layouts, choose_layouts, config_of, layout_from_text

SCHEDULES = set(get_args(PipelineSchedule))


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("1x2x3x4", Layout((1, 2, 3, 1, 4))),
        ("1x1x2x1-cp2", Layout((1, 1, 2, 2, 1))),
        ("1x1x4x1-ep2", Layout((1, 1, 4, 1, 1), ep=2)),
        ("2x1x2x1-cp2-ep4:GPipe", Layout((2, 1, 2, 2, 1), "GPipe", 4)),
        ("2x1x2x1", Layout((2, 1, 2, 1, 1), "GPipe")),
        ("2x1x2x1-cp3:ZBVZeroBubble", Layout((2, 1, 2, 3, 1), "ZBVZeroBubble")),
    ],
)
def test_a_named_layout(text: str, layout: Layout) -> None:
    assert layout_from_text(text, "GPipe") == layout
    assert layout_from_text(str(layout), "1F1B") == layout


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("2x2", "PPxDP_REPLICATE"),
        ("0x1x1x1", "degrees are 1 or more"),
        ("-1x1x1x1", "degrees are 1 or more"),
        ("2x1x1x1:", "PPxDP_REPLICATE"),
        ("1x1x1x1-cp0", "[-cpCP]"),
        ("1x1x2x1-ep2-cp2", "[-cpCP][-epEP]"),
        ("2x1x1x1:1f1b", "the schedules: GPipe"),
        ("1x1x2x1:GPipe", "pp above 1"),
        ("1000000x1x1x1", "at most 64 ranks"),
    ],
)
def test_an_invalid_layout(text: str, rule: str) -> None:
    problem = layout_from_text(text, "1F1B")
    assert isinstance(problem, Problem)
    assert (problem.key, problem.value) == ("--layouts", text)
    assert rule in problem.rule


def test_candidates_are_all_factorizations_with_all_schedules() -> None:
    *found, uneven = candidate_layouts(12, "DualPipeV")
    assert [str(layout) for layout in uneven] == ["1x1x11x1"]
    degrees = [x.degrees for x, *_ in found]
    assert all(prod(factors) == 12 for factors in degrees)
    assert len(degrees) == len(set(degrees)) == 15 * 5  # of 2^2: 15, of 3: 5
    for candidates in found:
        names = [layout.schedule for layout in candidates]
        assert names == [None] if candidates[0].degrees[0] == 1 else set(names) == SCHEDULES
        assert names[0] == (None if candidates[0].degrees[0] == 1 else "DualPipeV")


@EACH_SCHEDULE
def test_four_ranks_have_each_factorization_and_each_schedule() -> None:
    accepted, refused = choose_layouts(small_config(1, "model.n_layers=6", "model.n_kv_heads=4"), 4)
    assert refused == []
    assert str(accepted.pop()) == "1x1x3x1"
    assert len({x.degrees for x in accepted}) == 15
    assert {x.schedule for x in accepted} == {None, *SCHEDULES}
    pipelines = [x for x in accepted if x.degrees[0] > 1]
    assert len(pipelines) == 5 * 3
    assert sum(x.schedule == "1F1B" for x in pipelines) == 5


def test_a_model_with_experts_also_has_layouts_with_expert_parallelism() -> None:
    accepted, _ = choose_layouts(small_config(1, *EXPERTS), 4)
    by_ep = {ep: {str(x) for x in accepted if x.ep == ep} for ep in (1, 2, 4)}
    assert {x.degrees for x in accepted if x.ep == 1} > {x.degrees for x in accepted if x.ep == 2}
    assert {"1x1x4x1-ep2", "1x1x2x1-cp2-ep2", "1x2x2x1-ep2", "1x1x2x2-ep2", "2x1x2x1-ep2:1F1B"} <= by_ep[2]
    assert by_ep[4] == set()  # 6 experts
    accepted, _ = choose_layouts(small_config(1, *EXPERTS, "model.n_experts=8"), 4)
    assert "1x1x4x1-ep4" in {str(x) for x in accepted}


def test_refused_layouts_come_with_the_problems_of_the_checks() -> None:
    accepted, refused = choose_layouts(small_config(1), 4)  # 2 key/value heads, 2 layers
    assert "1x1x1x4" in [str(refusal.layout) for refusal in refused]
    by_name = {str(refusal.layout): refusal.problems for refusal in refused}
    assert by_name["1x1x1x4"][0].key == "model.n_kv_heads"
    assert all(problem.key == "parallelism.pp" for problem in by_name["4x1x1x1:LoopedBFS"])
    assert {str(layout) for layout in accepted} >= {"1x1x2x2", "4x1x1x1:1F1B", "4x1x1x1:GPipe"}
    assert not {str(layout) for layout in accepted} & by_name.keys()


def test_pp_split_stays_only_if_it_matches_the_number_of_stages() -> None:
    config = small_config(1, 'parallelism.pp_split=["layers.1"]')
    assert config_of(config, Layout((2, 1, 1, 1, 1), "1F1B")).parallelism.pp_split == ("layers.1",)
    assert config_of(config, Layout((2, 1, 1, 1, 1), "ZBVZeroBubble")).parallelism.pp_split == ()
    assert config_of(config, Layout((1, 1, 2, 1, 1))).parallelism.pp_split == ()
