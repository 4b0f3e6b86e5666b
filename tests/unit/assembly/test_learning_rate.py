"""The learning rates of a run compared with those of the checkpoint that it starts from."""

import json
from dataclasses import asdict

import pytest

from tests.configuration import parse_config
from titanlite.assembly.description import describe_jump, describe_moved_decay
from titanlite.checkpoint.start import Start
from titanlite.config.schema import JobConfig

TRUNK = ("training.steps=100", "optimizer.lr=1e-3", "lr_schedule.warmup_steps=10", "lr_schedule.decay=none")


def configured(*settings: str) -> JobConfig:
    values = dict(setting.split("=", 1) for setting in settings)
    config, problems = parse_config([f"--{key}={value}" for key, value in values.items()])
    assert problems == []
    return config


def started(step: int, *settings: str) -> Start:
    """The start from a checkpoint of a run with these settings."""
    return Start(step, (), json.loads(json.dumps(asdict(configured(*settings)))))


@pytest.mark.parametrize(
    "settings",
    [
        ("lr_schedule.decay=sqrt", "lr_schedule.final_decay_steps=20", "training.steps=80"),
        ("lr_schedule.decay=sqrt", "lr_schedule.final_decay_steps=20", "training.steps=100"),
        ("lr_schedule.decay=linear", "lr_schedule.decay_ratio=0.25", "training.steps=80"),
        ("lr_schedule.warmup_steps=60",),
        ("training.steps=1000",),
        ("training.steps=60", "lr_schedule.decay=linear"),  # no step is left
    ],
)
def test_no_jump_if_the_decay_begins_later(settings: tuple[str, ...]) -> None:
    config, start = configured(*TRUNK, *settings), started(60, *TRUNK)
    assert describe_jump(config, start) == describe_moved_decay(config, start) == ""


def test_a_decay_that_should_have_begun_before_is_a_jump_with_a_remedy() -> None:
    late = ("lr_schedule.decay=linear", "lr_schedule.min_lr_factor=0")
    for length in ("lr_schedule.final_decay_steps=40", "lr_schedule.decay_ratio=0.5"):
        config = configured(*TRUNK, *late, length, "training.steps=80")
        assert describe_jump(config, started(60, *TRUNK)) == (
            "The learning rate jumps: step 60 was trained with 0.001, and has 0.0005 in this run's schedule. The decay "
            "would have begun at step 41; to begin it at step 61: --lr_schedule.final_decay_steps 20"
        )


def test_other_jumps_name_both_rates() -> None:
    decayed = (*TRUNK, "lr_schedule.decay=linear", "lr_schedule.decay_ratio=0.5", "lr_schedule.min_lr_factor=0")
    longer = configured(*decayed, "training.steps=200")
    text = "The learning rate jumps: step 75 was trained with 0.0005, and has 0.001 in this run's schedule"
    assert describe_jump(longer, started(75, *decayed)) == text
    assert "training.steps: 100 in the checkpoint, 200 now" in describe_moved_decay(longer, started(75, *decayed))
    other_peak = describe_jump(configured(*TRUNK, "optimizer.lr=2e-3"), started(60, *TRUNK))
    assert other_peak.endswith("was trained with 0.001, and has 0.002 in this run's schedule")


def test_the_rate_of_the_checkpoint_is_that_of_its_own_stages() -> None:
    """Tokens of a stage that begins later decide how far a decay by tokens is."""
    decay = (*TRUNK, "lr_schedule.decay=linear", "lr_schedule.over=tokens", "training.global_batch_size=8")
    stage = ("training.stages.0.from_step=81", "training.stages.0.global_batch_size")
    start = started(60, *decay, stage[0], f"{stage[1]}=16")
    assert describe_jump(configured(*decay, stage[0], f"{stage[1]}=16"), start) == ""
    text = "The learning rate jumps: step 60 was trained with "
    assert describe_jump(configured(*decay, stage[0], f"{stage[1]}=64"), start).startswith(text)
    assert describe_jump(configured(*decay), start).startswith(text)


def test_a_checkpoint_of_an_older_version_lacks_keys_and_may_have_others() -> None:
    start = started(60, *TRUNK)
    del start.config["lr_schedule"]["final_decay_steps"]
    start.config["lr_schedule"]["removed"] = 1
    assert describe_jump(configured(*TRUNK), start) == ""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr_schedule.decay", "of_a_plugin"),
        ("lr_schedule.decay", []),
        ("lr_schedule.warmup_steps", -5),
        ("lr_schedule.decay_steps", "5 %"),
        ("lr_schedule.min_lr_factor", "x"),
        ("optimizer.lr", None),
        ("training.steps", 0),
    ],
)
def test_a_value_of_the_checkpoint_that_is_not_valid_is_named(key: str, value: object) -> None:
    start = started(60, *TRUNK)
    section, _, name = key.partition(".")
    start.config[section][name] = value
    text = f"Whether the learning rate jumps is unknown: the checkpoint has {key} = {value!r} (valid: "
    assert describe_jump(configured(*TRUNK), start).startswith(text)
    assert describe_moved_decay(configured(*TRUNK), start) == ""


def test_a_run_from_weights_has_no_earlier_schedule() -> None:
    start = Start(0, (), {})
    assert describe_jump(configured(*TRUNK), start) == describe_moved_decay(configured(*TRUNK), start) == ""
