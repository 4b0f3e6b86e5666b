"""The learning rate by step."""

import math
from itertools import product

import pytest

from titanlite.optim.schedule import ScheduleConfig, build_schedule, check_schedule, depends_on_steps


def rates(section: ScheduleConfig, steps: int, upto: int | None = None) -> list[float]:
    schedule = build_schedule(section, 1.0, steps)
    return [schedule(step) for step in range(1, (upto or steps) + 1)]


def test_warm_up_then_decay_to_the_minimum_at_the_last_step() -> None:
    found = rates(ScheduleConfig(warmup_steps=4, decay="linear", min_lr_factor=0.0), 8)
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_stable_phase_before_a_decay_by_ratio() -> None:
    section = ScheduleConfig(warmup_steps=0, decay="linear", decay_ratio=0.2, min_lr_factor=0.5)
    assert rates(section, 10) == pytest.approx([1.0] * 8 + [0.75, 0.5])


def test_decay_steps_do_not_depend_on_the_length_of_the_run() -> None:
    section = ScheduleConfig(warmup_steps=2, decay="cosine", decay_steps=5, min_lr_factor=0.1)
    assert rates(section, 10, 10) == rates(section, 1000, 10)
    assert rates(section, 1000, 10)[6:] == pytest.approx([0.1] * 4)


@pytest.mark.parametrize("decay", ["none", "linear", "cosine", "sqrt"])
def test_depends_on_steps_is_true_if_an_extended_run_differs(decay: str) -> None:
    lengths = [{}, {"decay_steps": 5}, {"decay_ratio": 0.5}, {"decay_ratio": 1.0}]
    for length, factor, warmup_steps in product(lengths, [0.0, 0.1, 1.0], [0, 3, 12]):
        section = ScheduleConfig(warmup_steps=warmup_steps, decay=decay, min_lr_factor=factor, **length)  # type: ignore[arg-type]
        assert depends_on_steps(section) == (rates(section, 20) != rates(section, 40, 20)), section


@pytest.mark.parametrize(
    ("decay", "half"), [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("none", 1)]
)
def test_shapes_halfway(decay: str, half: float) -> None:
    section = ScheduleConfig(warmup_steps=0, decay=decay, min_lr_factor=0.0)
    assert rates(section, 10)[4] == pytest.approx(half)


@pytest.mark.parametrize("decay", ["none", "linear", "cosine", "sqrt"])
@pytest.mark.parametrize("ratio", [-1.0, 0.5])
def test_a_run_shorter_than_its_warm_up_has_positive_rates(decay: str, ratio: float) -> None:
    section = ScheduleConfig(warmup_steps=100, decay=decay, decay_ratio=ratio, min_lr_factor=0.1)
    found = rates(section, 40)
    assert found[0] == pytest.approx(0.01)
    assert all(0 < rate <= 1 for rate in found)
    assert found[:20] == sorted(found[:20])


def test_edges_of_the_ranges_are_valid() -> None:
    for section in (ScheduleConfig(warmup_steps=50), ScheduleConfig(decay_steps=1), ScheduleConfig(decay_ratio=1.0)):
        assert check_schedule(section) == []
