"""The units of pipeline stages, and configurations that are refused before the run."""

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch

import titanlite.models.registry  # noqa: F401 - the families
from titanlite.models.decoder import flops_of_blocks
from titanlite.models.family import LanguageModel, ModelConfig, Structure, resolve_model
from titanlite.parallel.mesh import ParallelismConfig, PipelineSchedule
from titanlite.parallel.pipeline import (
    SCHEDULES,
    check_pipeline,
    forward_timetable,
    local_stages,
    num_stages,
    resolve_reshard_after_forward,
    stage_owners,
)
from titanlite.parallel.recompute import ActivationCheckpointConfig
from titanlite.parallel.split import assign_units, keep_units_, split_stages, stage_structure, unit_costs, unit_weights

STRUCTURE = Structure((("embedding",), *((f"layers.{index}",) for index in range(6)), ("norm", "output")), {}, {})


def all_splits(units: int, stages: int) -> list[list[range]]:
    return [
        [range(start, end) for start, end in pairwise((0, *cuts, units))]
        for cuts in combinations(range(1, units), stages - 1)
    ]


def stage_costs(costs: list[int], split: list[range]) -> list[int]:
    return [sum(costs[unit] for unit in stage) for stage in split]


def test_the_split_is_optimal() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        units = int(torch.randint(1, 9, (), generator=generator))
        stages = int(torch.randint(1, units + 1, (), generator=generator))
        costs = torch.randint(0, 20, (units,), generator=generator).tolist()
        split = assign_units(costs, [], stages)
        assert [unit for stage in split for unit in stage] == list(range(units))
        assert len(split) == stages
        assert all(len(stage) > 0 for stage in split)
        found = stage_costs(costs, split)
        others = [stage_costs(costs, other) for other in all_splits(units, stages)]
        assert max(found) == min(max(other) for other in others)
        squares = [sum(cost**2 for cost in other) for other in others if max(other) == max(found)]
        assert sum(cost**2 for cost in found) == min(squares)


def test_units_that_share_a_parameter_are_one_fsdp_unit() -> None:
    _, structure = model_of(2, tied=True)
    assert stage_structure(structure, range(4)).units == (
        *(("layers.0",), ("layers.1",)),
        ("tok_embeddings", "norm", "output"),
    )
    assert stage_structure(structure, range(2)).units == (("tok_embeddings",), ("layers.0",))


def test_given_cuts_are_used() -> None:
    assert assign_units([1, 100, 1, 1], [1, 3], 3) == [range(1), range(1, 3), range(3, 4)]


def model_of(layers: int, *, tied: bool = False) -> tuple[LanguageModel, Structure]:
    family, config = resolve_model(ModelConfig(overrides={"n_layers": layers, "tie_embeddings": tied}))
    with torch.device("meta"):
        return family.build(config), family.structure(config)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("split", [(), ("layers.1", "layers.2", "norm")])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_together_are_the_model(schedule: PipelineSchedule, split: tuple[str, ...], tied: bool) -> None:
    section = ParallelismConfig(pp=4 // SCHEDULES[schedule].stages_per_rank, pp_schedule=schedule, pp_split=split)
    assert num_stages(section) == 4
    owned = sorted(stage for rank in range(section.pp) for stage in local_stages(section, rank))
    assert owned == [0, 1, 2, 3]
    model, _ = model_of(5, tied=tied)
    names: list[str] = []
    for stage in owned:
        part, structure = model_of(5, tied=tied)
        stages = split_stages(unit_weights(part, structure), structure, 10**9, section, ActivationCheckpointConfig())
        keep_units_(part, structure, stages, stage, stage_owners(section))
        stage_plan = stage_structure(structure, stages[stage])
        names += [name for name, _ in part.named_parameters()]
        assert all(stage_plan.blocks[name] == int(name.split(".")[1]) for name in stage_plan.blocks)
    copies = ["tok_embeddings.weight"] if tied else []
    assert names == [name for name, _ in model.named_parameters()] + copies
    if tied:
        shape = SCHEDULES[schedule]
        assert part.holders == {copies[0]: (0,) if shape.placement == "v" else (0, section.pp - 1)}
    elif split:
        assert names[-2:] == ["norm.weight", "output.weight"]
        assert {name.split(".")[0] for name, _ in part.named_parameters()} == {"norm", "output"}


@pytest.mark.parametrize(
    ("mode", "schedule", "bit_equal", "block", "head"),
    [
        ("none", "GPipe", False, 3, 5),
        ("selective", "InterleavedZeroBubble", False, 3, 6),
        ("full", "Interleaved1F1B", False, 4, 4),
        ("none", "ZBVZeroBubble", True, 3, 6),
    ],
)
@pytest.mark.parametrize("family", ["llama3", "qwen3_moe", "olmo3", "deepseek_v3"])
def test_the_cost_of_units_is_their_flops(
    family: str, mode: Any, schedule: PipelineSchedule, bit_equal: bool, block: int, head: int
) -> None:
    """Those of the model's formula, in which tokens use some of the experts, by the passes of each unit. The last layer
    of olmo3 has no window. The first one of deepseek_v3 has no experts, but as wide a feed-forward layer as the others
    use; its last one predicts a further token, for which the head computes twice."""
    own = {"n_further_tokens": 1, "n_layers": 2, "dense_ffn_dim": 3 * 128} if family == "deepseek_v3" else {}
    model, config = resolve_model(ModelConfig(family=family, overrides={"n_layers": 3, **own}))
    with torch.device("meta"):
        weights = unit_weights(model.build(config), structure := model.structure(config))
    section, recompute = ParallelismConfig(pp=2, pp_schedule=schedule), ActivationCheckpointConfig(mode=mode)
    flops, output = model.flops_per_token(config, 4096), 6 * (1 + bool(own)) * config.vocab_size * config.dim
    of_blocks = flops_of_blocks(config, 4096)
    embedding, *blocks, last = unit_costs(weights, structure, flops, section, recompute, of_blocks, bit_equal=bit_equal)
    assert (embedding, last) == (0, head * output)
    assert sum(blocks) == pytest.approx(block * (flops - output), rel=1e-6)
    full = 12 * (4096 - 64) * config.dim if family == "olmo3" else 0
    router, projection = (6 * config.dim * width for width in ((8, 2 * config.dim) if own else (0, 0)))
    more = [0, router, router + projection + full]
    assert [cost - blocks[0] for cost in blocks] == [block * each for each in more]


def test_stages_of_a_rank() -> None:
    loop = ParallelismConfig(pp=4, pp_schedule="Interleaved1F1B")
    assert [local_stages(loop, rank) for rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    v = ParallelismConfig(pp=4, pp_schedule="DualPipeV")
    assert [local_stages(v, rank) for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert local_stages(ParallelismConfig(pp=1, pp_schedule="DualPipeV"), 0) == [0]


def test_valid_pipelines_are_accepted() -> None:
    assert check_pipeline(ParallelismConfig(pp=2, pp_split=("norm",)), STRUCTURE) == []
    assert check_pipeline(ParallelismConfig(pp=2, pp_microbatch_size=4), STRUCTURE) == []
    assert check_pipeline(ParallelismConfig(pp=1, pp_split=("nowhere",), pp_microbatch_size=0), STRUCTURE) == []


def test_units_that_one_stage_must_have() -> None:
    """As the block that predicts further tokens, and the head. A stage may use a shared weight twice, unless its
    gradient is computed later."""
    together = replace(STRUCTURE, last=2, shared={"embedding.weight": ("further.weight", "output.weight")})
    assert together.cuts[-1] == "layers.5"
    assert assign_units([0, 1, 1, 1, 1, 9], [], 3, 2) == [range(2), range(2, 4), range(4, 6)]
    assert assign_units([0, 1, 1, 1, 1, 9], [], 5, 2)[-1] == range(4, 6)
    keys = {"pp": 2, "pp_split": ("norm",)}
    assert [problem.key for problem in check_pipeline(ParallelismConfig(**keys), together)] == ["parallelism.pp_split"]
    later = ParallelismConfig(pp=2, pp_schedule="ZBVZeroBubble")
    assert [problem.key for problem in check_pipeline(later, together)] == ["parallelism.pp_schedule"]
    assert check_pipeline(later, STRUCTURE) == check_pipeline(ParallelismConfig(pp=2), together) == []


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_forward_timetable_is_complete_and_in_order(schedule: PipelineSchedule, pp: int, count: int) -> None:
    owners = stage_owners(ParallelismConfig(pp=pp, pp_schedule=schedule))
    assert sorted(set(owners)) == list(range(pp))
    times: dict[tuple[int, int], int] = {}
    table = forward_timetable(owners, count)
    for time, computed in enumerate(table):
        assert len({owners[stage] for stage, _ in computed}) == len(computed)
        times |= dict.fromkeys(computed, time)
    assert len(times) == sum(map(len, table)) == len(owners) * count
    for (stage, microbatch), time in times.items():
        assert stage == 0 or times[stage - 1, microbatch] < time
        assert microbatch == 0 or times[stage, microbatch - 1] < time
    if len(owners) == pp:
        assert len(table) == pp + count - 1  # no rank waits longer than necessary


@pytest.mark.parametrize(("pp", "expected"), [(1, "default"), (2, "never")])
def test_a_pipeline_keeps_parameters_gathered_by_default(pp: int, expected: str) -> None:
    assert resolve_reshard_after_forward(ParallelismConfig(pp=pp)) == expected
    always = ParallelismConfig(pp=pp, fsdp_reshard_after_forward="always")
    assert resolve_reshard_after_forward(always) == "always"
