"""Comparison of a run's learning rates with those of the checkpoint that it starts from."""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from titanlite.checkpoint.start import Start
from titanlite.config.schema import JobConfig
from titanlite.optim.schedule import ScheduleConfig, build_schedule, decay_span, decays, depends_on_steps


def describe_moved_decay(config: JobConfig, start: Start) -> str:
    """A decay that moves with a change of training.steps, in one line; "" if none does."""
    steps = config.training.steps
    if not start.config or start.step >= steps:
        return ""
    earlier, earlier_steps = saved_schedule(start.config), start.config["training"]["steps"]
    if steps == earlier_steps or not (depends_on_steps(earlier) and depends_on_steps(config.lr_schedule)):
        return ""
    return (
        f"training.steps: {earlier_steps} in the checkpoint, {steps} now; the decay of the learning rate moves with it "
        '(lr_schedule.decay = "none", or decay_steps, would not depend on it)'
    )


def describe_jump(config: JobConfig, start: Start) -> str:
    """A jump of the learning rate at the start of the run, with a remedy if its decay should have begun before; "" if
    the schedules of the checkpoint and of the run agree about the checkpoint's step."""
    section, steps, step = config.lr_schedule, config.training.steps, start.step
    if not start.config or step >= steps:
        return ""
    earlier, earlier_steps = saved_schedule(start.config), start.config["training"]["steps"]
    before = build_schedule(earlier, start.config["optimizer"]["lr"], earlier_steps)(step)
    now = build_schedule(section, config.optimizer.lr, steps)(step)
    if math.isclose(before, now):
        return ""
    text = (
        f"The learning rate jumps: step {step} was trained with {before:.4g}, and has {now:.4g} in this run's schedule"
    )
    last_before, _ = decay_span(section, steps)
    had_begun = decays(earlier) and decay_span(earlier, earlier_steps)[0] < step
    if not decays(section) or last_before >= step or had_begun:
        return text
    return (
        f"{text}. The decay would have begun at step {last_before + 1}; to begin it at step {step + 1}: "
        f"--lr_schedule.final_decay_steps {steps - step}"
    )


def saved_schedule(saved: Mapping[str, Any]) -> ScheduleConfig:
    """[lr_schedule] of a checkpoint's configuration; keys that it lacks have their defaults."""
    known = {field.name for field in fields(ScheduleConfig)}
    return ScheduleConfig(**{key: value for key, value in saved["lr_schedule"].items() if key in known})
