"""The search: equal to a comparison of everything, within its limits, and what it keeps."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest

from tests.configuration import EACH_SCHEDULE
from tests.unit.planning.test_step_time import config_of, profile
from titanlite.config.check import check_config
from titanlite.config.load import load_config
from titanlite.config.schema import JobConfig
from titanlite.parallel.mesh import LAYOUT, ContextParallel, PipelineSchedule
from titanlite.planning.estimate import estimate
from titanlite.planning.hardware.machine import Profile, load_profile
from titanlite.planning.search import (
    PP_SCHEDULES,
    RECOMPUTE,
    RESHARD,
    SEARCHED,
    SYNC,
    Choice,
    Found,
    search,
    with_settings,
)
from titanlite.planning.step_time import StepTime, predict
from titanlite.runtime.memory import GIB, USABLE

SETTINGS = ("model.n_layers=4", "training.global_batch_size=8", "training.local_batch_size=1")


def machine(**changes: Any) -> Profile:
    """Slow enough links and memory that choices differ."""
    return profile(latency_s=2e-6, bytes_per_s=2e9, operation_s=2e-6, unit_s=1e-5, **changes)


def everything(world_size: int, on: Profile, memory_gib: float) -> dict[tuple[int, ...], float]:
    """The least time of each mesh that fits, by predicting all combinations."""
    base = config_of(world_size, SETTINGS)
    found: dict[tuple[int, ...], float] = {}
    powers = [size for size in (1, 2, 4, 8) if world_size % size == 0]
    for pp, replicas, cp, tp in product(powers, repeat=4):
        shards, rest = divmod(world_size, pp * replicas * cp * tp)
        if rest or on.ranks_per_node % tp:
            continue
        mesh = {"pp": pp, "dp_replicate": replicas, "dp_shard": shards, "cp": cp, "tp": tp}
        best = found.get((pp, replicas, shards, cp, tp), float("inf"))
        schedules = get_args(PipelineSchedule) if pp > 1 else ("1F1B",)
        ways = get_args(ContextParallel) if cp > 1 else ("heads",)
        sizes = (1, 2, 4, 8)
        for schedule, way, rows, recompute, reshard, sync in product(schedules, ways, sizes, RECOMPUTE, RESHARD, SYNC):
            layout = {**mesh, "pp_schedule": schedule, "context_parallel": way, "gradient_sync": sync}
            layout["fsdp_reshard_after_forward"] = reshard
            batch = {"parallelism.pp_microbatch_size": rows, "training.local_batch_size": 8 // (replicas * shards) or 1}
            size = batch if pp > 1 else {"training.local_batch_size": rows}
            settings = {**{f"parallelism.{key}": value for key, value in layout.items()}, **size, **recompute}
            config = with_settings(base, settings)
            if rows * replicas * shards > 8:
                continue
            if check_config(config, world_size=world_size, device_type="cuda", checks_files=False):
                continue
            plan = estimate(config, world_size, device_type="cuda")
            if plan.largest.memory.total <= USABLE * memory_gib * GIB:
                best = min(best, predict(config, plan, on).total)
        if best < float("inf"):
            found[pp, replicas, shards, cp, tp] = best
    return found


@pytest.mark.parametrize(
    ("ranks", "memory_gib"),
    [
        pytest.param(2, 0.08, marks=pytest.mark.slow),
        *(pytest.param(4, memory_gib, marks=pytest.mark.soak) for memory_gib in (0.06, 80.0)),
    ],
)
def test_the_search_finds_what_a_comparison_of_everything_finds(ranks: int, memory_gib: float) -> None:
    on = machine()
    found = search(config_of(ranks, SETTINGS), ranks, on, memory_gib=memory_gib, count=5)
    times = everything(ranks, on, memory_gib)
    expected = sorted(times.values())[: len(found.fastest)]
    assert [choice.time.total for choice in found.fastest] == pytest.approx(expected)
    assert len(found.fastest) == min(5, len(times))
    for choice in found.fastest:
        assert times[choice.axes[:5]] == pytest.approx(choice.time.total)


def found_for(world_size: int, *settings: str, kept: Sequence[str] = (), on: Profile | None = None) -> Found:
    config = config_of(world_size, (*SETTINGS, *settings))
    return search(config, world_size, on or machine(), memory_gib=80, kept=kept)


@pytest.mark.slow
def test_the_search_is_deterministic_and_keeps_what_is_given() -> None:
    kept = ("parallelism.tp", "activation_checkpoint.mode", "parallelism.dp_shard")
    found = found_for(8, "parallelism.tp=2", kept=kept)
    assert found == found_for(8, "parallelism.tp=2", kept=kept)
    assert {choice.config.parallelism.tp for choice in found.fastest} == {2}
    assert {choice.config.activation_checkpoint.mode for choice in found.fastest} == {"none"}
    assert len({choice.config.parallelism.dp_shard for choice in found.fastest}) > 1  # -1 leaves it open
    (only,) = found_for(8, "parallelism.dp_shard=8", kept=("parallelism.dp_shard",)).fastest
    assert only.mesh == "dp_shard 8"


@pytest.mark.slow
def test_tensor_parallelism_stays_inside_a_node() -> None:
    on = machine(ranks_per_node=2)
    found = search(config_of(8, SETTINGS), 8, on, memory_gib=80, count=100)
    assert {choice.config.parallelism.tp for choice in found.fastest} == {1, 2}


@pytest.mark.slow
def test_every_number_of_ranks_and_experts() -> None:
    assert {choice.mesh for choice in found_for(3).fastest} >= {"dp_shard 3"}
    experts = search(config_of(4, (*SETTINGS, "model.family=qwen3_moe")), 4, machine(), memory_gib=80, count=100)
    assert {choice.config.parallelism.ep for choice in experts.fastest} == {1, 2, 4}


@pytest.mark.slow
def test_what_is_too_large_is_named_with_its_least_memory() -> None:
    on = load_profile("h100")
    config = load_config(["--job.config_file", "llama3_70b"], world_size=64, device_type="cuda", checks_files=False)
    found = search(config, 8, on, memory_gib=on.memory_gib)
    assert found.fastest == ()
    assert "dp_shard 8" in {each.mesh for each in found.too_large}
    assert min(each.memory_bytes for each in found.too_large) > USABLE * on.memory_gib * GIB


@pytest.mark.soak
def test_thousands_of_ranks_take_seconds() -> None:
    import time

    on = load_profile("h100")
    config = load_config(
        ["--job.config_file", "llama3_405b", "--training.global_batch_size", "4096"],
        world_size=4096,
        device_type="cuda",
        checks_files=False,
    )
    begin = time.process_time()
    found = search(config, 4096, on, memory_gib=on.memory_gib)
    assert time.process_time() - begin < 30
    best = found.fastest[0]
    assert best.memory_bytes <= USABLE * on.memory_gib * GIB
    plan = estimate(best.config, 4096, device_type="cuda")
    assert best.memory_bytes == plan.largest.memory.total
    assert best.time.total == predict(best.config, plan, on).total


@pytest.mark.parametrize(
    ("other", "seconds", "chosen"),
    [({"dp_shard": 8}, 1.029, 1), ({"dp_shard": 8}, 1.031, 0), ({"tp": 2, "cp": 4}, 1.01, 0)],
)
def test_of_layouts_that_count_as_equal_the_one_with_the_fewest_axes_is_chosen(
    other: dict[str, int], seconds: float, chosen: int
) -> None:
    choices = []
    for degrees, time in (({"pp": 2, "dp_shard": 4}, 1.0), (other, seconds), ({"tp": 8}, 1.2)):
        settings = {f"parallelism.{axis}": degrees.get(axis, 1) for axis in LAYOUT}
        choices.append(Choice(settings, JobConfig(), {}, 1, 1, 1, 1, StepTime({"products": time}, time)))
    assert Found(tuple(choices), (), 3).best is choices[chosen]


@pytest.mark.slow
def test_a_profile_of_another_machine_gives_another_choice() -> None:
    """With slow links between nodes, parameters are not gathered over them."""
    slow = machine(ranks_per_node=2)
    node = slow.network["node"]
    between = {name: replace(link, bytes_per_s=1e6) for name, link in node.items()}
    best = search(config_of(4, SETTINGS), 4, replace(slow, network={"node": node, "cluster": between}), memory_gib=80)
    assert best.fastest[0].sizes["dp_shard"] <= 2


@EACH_SCHEDULE
@pytest.mark.parametrize(
    ("schedule", "reshard"),
    [*((schedule, "never") for schedule in PP_SCHEDULES), ("1F1B", "always"), ("Interleaved1F1B", "always")],
)
def test_the_time_of_many_microbatches_follows_from_that_of_few(schedule: str, reshard: str) -> None:
    """With unequal stages, too: 5 blocks and a large head."""
    on = machine()
    settings = (f"parallelism.pp_schedule={schedule}", f"parallelism.fsdp_reshard_after_forward={reshard}")
    layout = ("parallelism.pp=2", "parallelism.dp_shard=2", "training.local_batch_size=32", *settings)
    batch = ("training.global_batch_size=64", "model.n_layers=5", "model.vocab_size=4096")
    config = config_of(4, (*SETTINGS, *batch, *layout))
    (choice,) = search(config, 4, on, memory_gib=80, kept=SEARCHED).fastest
    plan = estimate(choice.config, 4, device_type="cuda")
    assert choice.microbatches == plan.microbatches == 32
    assert choice.time.total == pytest.approx(predict(choice.config, plan, on).total, rel=1e-9)
    assert choice.memory_bytes == plan.largest.memory.total
    assert choice.sent_bytes == max(sum(part.sent_bytes for part in rank.traffic) for rank in plan.ranks)
