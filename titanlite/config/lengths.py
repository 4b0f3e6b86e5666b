"""Lengths of the run, the warm-up and the decay: by one of several keys, in steps, tokens or a percentage."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from titanlite.config.schema import JobConfig
from titanlite.optim.lengths import LENGTHS as TEXT_LENGTHS
from titanlite.optim.lengths import steps_of
from titanlite.runtime.errors import Problem

LENGTHS = (
    ("training.steps", "training.tokens"),
    ("lr_schedule.decay_steps", "lr_schedule.decay_ratio", "lr_schedule.final_decay_steps"),
)
"""Keys of which only one is given."""

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
    """Replace tokens, rounded up to full steps, and percentages by steps.

    Needs a resolved training.global_batch_size. The ratio of the decay remains: it counts back from the last step.
    """
    training = config.training
    tokens_per_step = max(1, training.global_batch_size * training.seq_len)  # the ranges are checked later
    if training.tokens != UNSET:
        training = replace(training, steps=-(-training.tokens // tokens_per_step), tokens=UNSET)
    sections: dict[str, Any] = {"training": training}
    for name, keys in TEXT_LENGTHS.items():
        section = getattr(config, name)
        texts = {key: text for key in keys if isinstance(text := getattr(section, key), str)}
        steps = {key: steps_of(text, tokens_per_step, training.steps) for key, text in texts.items()}
        least = {key: 0 if key == "warmup_steps" else 1 for key in steps}
        sections[name] = replace(section, **{key: max(least[key], number) for key, number in steps.items()})
    return replace(config, **sections)
