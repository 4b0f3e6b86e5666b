"""Lengths that are given by one of several keys: in steps, in tokens or as a ratio."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from titanlite.config.schema import JobConfig
from titanlite.runtime.errors import Problem

LENGTHS = (
    ("training.steps", "training.tokens"),
    ("lr_schedule.warmup_steps", "lr_schedule.warmup_tokens", "lr_schedule.warmup_ratio"),
    (
        *("lr_schedule.decay_steps", "lr_schedule.decay_tokens", "lr_schedule.decay_ratio"),
        *("lr_schedule.final_decay_steps", "lr_schedule.final_decay_tokens"),
    ),
)
"""The keys of each length."""

UNSET = -1


def override_lengths(tables: Mapping[str, dict[str, Any]], given: Collection[str]) -> None:
    """Remove a length from the tables of a file if another of its keys is given elsewhere: on the command line, or in a
    file that extends this one."""
    given = set(given)
    for keys in LENGTHS:
        if given.intersection(keys):
            for key in set(keys) - given:
                section, _, name = key.partition(".")
                tables.get(section, {}).pop(name, None)


def check_lengths(tables: Mapping[str, Mapping[str, Any]]) -> list[Problem]:
    """A Problem for each length that has several values. tables: of the file, overridden by the command line."""
    problems = []
    for keys in LENGTHS:
        parts = {key: key.partition(".") for key in keys}
        values = {key: tables.get(section, {}).get(name, UNSET) for key, (section, _, name) in parts.items()}
        given = [key for key in keys if values[key] != UNSET]
        if len(given) > 1:
            rule = f"only one of {', '.join(keys)}; {given[0]} = {values[given[0]]!r} is given, too"
            remedy = f"leave out all of {', '.join(given)} except one"
            problems.append(Problem(given[1], values[given[1]], rule, remedy))
    return problems


def resolve_lengths(config: JobConfig) -> JobConfig:
    """Replace tokens, rounded up to full steps, and the ratio of the warm-up by steps.

    Needs a resolved training.global_batch_size. The ratio of the decay remains: it counts back from the last step.
    """
    training, schedule = config.training, config.lr_schedule
    tokens_per_step = max(1, training.global_batch_size * training.seq_len)  # the ranges are checked later
    if training.tokens != UNSET:
        training = replace(training, steps=-(-training.tokens // tokens_per_step), tokens=UNSET)
    if schedule.warmup_tokens != UNSET:
        schedule = replace(schedule, warmup_steps=-(-schedule.warmup_tokens // tokens_per_step), warmup_tokens=UNSET)
    if schedule.warmup_ratio != UNSET:
        warmup_steps = round(min(schedule.warmup_ratio, 1.0) * training.steps)
        schedule = replace(schedule, warmup_steps=warmup_steps, warmup_ratio=float(UNSET))
    if schedule.final_decay_tokens != UNSET:
        final_decay_steps = -(-schedule.final_decay_tokens // tokens_per_step)
        schedule = replace(schedule, final_decay_steps=final_decay_steps, final_decay_tokens=UNSET)
    if schedule.decay_tokens != UNSET:
        schedule = replace(schedule, decay_steps=-(-schedule.decay_tokens // tokens_per_step), decay_tokens=UNSET)
    return replace(config, training=training, lr_schedule=schedule)
