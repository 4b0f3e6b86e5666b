"""The learning rate by step."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from titanlite.config.load import load_config
from titanlite.data.steps import BatchStage
from titanlite.optim.schedule import ScheduleConfig, build_schedule, depends_on_steps, describe_schedule
from titanlite.registration import register_schedule
from titanlite.runtime.errors import ConfigError


def rates(section: ScheduleConfig, steps: int, upto: int | None = None) -> list[float]:
    schedule = build_schedule(section, 1.0, steps)
    return [schedule(step) for step in range(1, (upto or steps) + 1)]


SCHEDULES: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    # As in docs/optimizers.md, for a run of 60 steps with a warm-up of 10 and min_lr_factor = 0.
    "constant": ({"decay": "none"}, lambda step: 1.0),  # noqa: ARG005
    "linear": ({"decay": "linear"}, lambda step: (60 - step) / 50),
    "cosine": ({"decay": "cosine"}, lambda step: math.cos(math.pi / 2 * (step - 10) / 50) ** 2),
    "sqrt": ({"decay": "sqrt"}, lambda step: 1 - ((step - 10) / 50) ** 0.5),
    "WSD": ({"decay": "sqrt", "final_decay_steps": 20}, lambda step: 1 - (max(step - 40, 0) / 20) ** 0.5),
    "WSD, linear": ({"decay": "linear", "final_decay_steps": 20}, lambda step: min(1.0, (60 - step) / 20)),
    "WSD, ratio": ({"decay": "linear", "decay_ratio": 0.25}, lambda step: min(1.0, (60 - step) / 15)),
    "fixed horizon": ({"decay": "linear", "decay_steps": 30}, lambda step: max(0.0, (40 - step) / 30)),
}


@pytest.mark.parametrize("minimum", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_each_schedule_follows_its_formula(name: str, minimum: float) -> None:
    keys, decay = SCHEDULES[name]
    found = rates(ScheduleConfig(warmup_steps=10, min_lr_factor=minimum, **keys), 60)
    expected = [n / 10 if n <= 10 else minimum + (1 - minimum) * decay(n) for n in range(1, 61)]
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


STAGES = (BatchStage(1, 4, 8), BatchStage(11, 16, 8), BatchStage(31, 8, 32))


def test_progress_by_tokens_and_scaling_with_the_batch() -> None:
    """Steps of 32 tokens, 128 from step 11 on, 256 from step 31 on."""
    tokens = [min(n, 10) * 32 + max(min(n, 30) - 10, 0) * 128 + max(n - 30, 0) * 256 for n in range(41)]
    section = ScheduleConfig(warmup_steps=12, final_decay_steps=15, min_lr_factor=0.0, over="tokens")
    schedule = build_schedule(section, 1.0, 40, STAGES)
    for step in range(1, 41):
        decay = max(tokens[step] - tokens[25], 0) / (tokens[40] - tokens[25])
        assert schedule(step) == pytest.approx(min(tokens[step] / tokens[12], 1 - decay), rel=1e-12)
    both = build_schedule(replace(section, batch_scaling="sqrt"), 1.0, 40, STAGES)
    for step, factor in ((10, 1.0), (11, 2.0), (30, 2.0), (31, 8**0.5)):
        assert both(step) == pytest.approx(factor * schedule(step), rel=1e-12)
    one = (BatchStage(1, 7, 9),)
    plain = replace(section, over="steps")
    assert [build_schedule(section, 0.3, 40, one)(n) for n in range(1, 41)] == [
        build_schedule(plain, 0.3, 40)(n) for n in range(1, 41)
    ]


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"lr_schedule.decay": "over", "lr_schedule.min_lr_factor": 0.6}, None),  # 0.4 is the least
        ({"lr_schedule.decay": "over", "lr_schedule.min_lr_factor": 0.1}, "at least 0; it is -0.35 of optimizer.lr"),
        ({"optimizer.weight_decay_end": 0.06, "optimizer.weight_decay_shape": "over"}, None),
        ({"optimizer.weight_decay_end": 0, "optimizer.weight_decay_shape": "over"}, "it is -0.05 to 0.1"),
        ({"optimizer.weight_decay_end": 0.1, "optimizer.weight_decay": 0}, "a value above 0"),
        ({"optimizer.name": "Muon", "optimizer.momentum_start": 0.5}, "a value above 0"),
        ({"optimizer.momentum_start": 0.5}, "only with Muon or SGD"),
        ({"optimizer.name": "Muon", "optimizer.momentum": 0.9, "optimizer.momentum_start": 0.7}, None),
        (
            {
                "optimizer.name": "Muon",
                "optimizer.momentum": 0.9,
                "optimizer.momentum_start": 0.6,
                "optimizer.momentum_shape": "over",
            },
            "momentum is at least 0 and below 1; it is 0.6 to 1.05",
        ),
    ],
)
def test_a_shape_may_leave_0_to_1_where_the_values_are_valid(settings: dict[str, Any], problem: str | None) -> None:
    register_schedule("over", lambda progress: 3 * progress if progress < 0.5 else 2 - progress)
    arguments = [f"--{key}={value}" for key, value in settings.items()]
    if problem is None:
        load_config(arguments, world_size=1, device_type="cpu", checks_files=False)
        return
    with pytest.raises(ConfigError, match=re.escape(problem)):
        load_config(arguments, world_size=1, device_type="cpu", checks_files=False)


@pytest.mark.parametrize("decay", ["linear", "cosine", "sqrt"])
def test_peak_and_minimum_are_exact(decay: Any) -> None:
    for minimum in (0.0, 1e-3, 0.1, 0.3, 0.7, 1.0):
        section = ScheduleConfig(warmup_steps=3, decay=decay, final_decay_steps=5, min_lr_factor=minimum)
        schedule = build_schedule(section, 1.5e-3, 20)
        assert [schedule(step) for step in range(3, 16)] == [1.5e-3] * 13
        assert [schedule(20), schedule(25)] == [1.5e-3 * minimum] * 2


def test_a_final_decay_is_at_most_the_entire_run() -> None:
    section = ScheduleConfig(warmup_steps=0, decay="linear", final_decay_steps=500, min_lr_factor=0.0)
    assert rates(section, 4) == [0.75, 0.5, 0.25, 0.0]


def test_decay_steps_do_not_depend_on_the_length_of_the_run() -> None:
    section = ScheduleConfig(warmup_steps=2, decay="cosine", decay_steps=5, min_lr_factor=0.1)
    assert rates(section, 10, 10) == rates(section, 1000, 10)
    assert rates(section, 1000, 10)[6:] == pytest.approx([0.1] * 4)


@pytest.mark.parametrize("decay", ["none", "linear", "cosine", "sqrt"])
def test_depends_on_steps_is_true_if_an_extended_run_differs(decay: str) -> None:
    lengths = [{}, {"decay_steps": 5}, {"decay_ratio": 0.5}, {"decay_ratio": 1.0}, {"final_decay_steps": 5}]
    for length, factor, warmup_steps in product(lengths, [0.0, 0.1, 1.0], [0, 3, 12]):
        section = ScheduleConfig(warmup_steps=warmup_steps, decay=decay, min_lr_factor=factor, **length)  # type: ignore[arg-type]
        assert depends_on_steps(section) == (rates(section, 20) != rates(section, 40, 20)), section


@pytest.mark.parametrize("decay", ["none", "linear", "cosine", "sqrt"])
@pytest.mark.parametrize("ratio", [-1.0, 0.5])
def test_a_run_shorter_than_its_warm_up_has_positive_rates(decay: str, ratio: float) -> None:
    section = ScheduleConfig(warmup_steps=100, decay=decay, decay_ratio=ratio, min_lr_factor=0.1)
    found = rates(section, 40)
    assert found[0] == pytest.approx(0.01)
    assert all(0 < rate <= 1 for rate in found)
    assert found[:20] == sorted(found[:20])


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"decay": "none"}, "warm-up to 0.0015 in steps 1 to 10, then constant"),
        ({"decay": "none", "warmup_steps": 0}, "constant at 0.0015"),
        ({"min_lr_factor": 1.0}, "warm-up to 0.0015 in steps 1 to 10, then constant"),
        (
            {"decay": "sqrt", "final_decay_steps": 20},
            "warm-up to 0.0015 in steps 1 to 10, constant to step 980, sqrt decay to 0.00015 in steps 981 to 1,000",
        ),
        (
            {"warmup_steps": 0, "final_decay_steps": 20},
            "constant at 0.0015 to step 980, linear decay to 0.00015 in steps 981 to 1,000",
        ),
        ({}, "warm-up to 0.0015 in steps 1 to 10, linear decay to 0.00015 in steps 11 to 1,000"),
        (
            {"warmup_steps": 0, "decay": "cosine", "min_lr_factor": 0.0},
            "cosine decay from 0.0015 to 0 in steps 1 to 1,000",
        ),
        (
            {"decay_steps": 100},
            "warm-up to 0.0015 in steps 1 to 10, linear decay to 0.00015 in steps 11 to 110, then constant",
        ),
        ({"warmup_steps": 2000}, "warm-up to 0.0015 in steps 1 to 2,000"),
        (
            {"decay": "none", "over": "tokens", "batch_scaling": "sqrt"},
            "warm-up to 0.0015 in steps 1 to 10, then constant; progress by tokens; times the square root of the "
            "tokens of a step, relative to stage 1",
        ),
        (
            {"warmup_steps": 600, "decay_ratio": 0.5},
            "warm-up to 0.0015 in steps 1 to 600, linear decay to 0.00015 in steps 501 to 1,000; the smaller of both "
            "where they overlap",
        ),
    ],
)
def test_the_log_names_the_steps_of_each_phase(keys: dict[str, Any], text: str) -> None:
    assert describe_schedule(ScheduleConfig(**{"warmup_steps": 10} | keys), 1.5e-3, 1000) == text
