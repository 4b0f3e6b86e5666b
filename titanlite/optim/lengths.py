"""Lengths of schedules in steps, tokens or a percentage of the run."""

import re
from collections.abc import Callable
from fractions import Fraction

Length = int | str
LENGTHS = {"lr_schedule": ("warmup_steps", "final_decay_steps", "decay_steps"), "optimizer": ("momentum_steps",)}
"""The keys by section whose values are a Length."""
LENGTH_RULE = 'a number of steps, or a text "N tokens" or "N %" (of training.steps, up to 100)'
LENGTH_PATTERN = r"^(?:([0-9](?:_?[0-9]){0,17}) tokens|(100|[0-9]{1,2}(?:\.[0-9]{1,9})?) ?%)$"


def steps_of(text: str, steps_of_tokens: Callable[[int], int], steps: int) -> int:
    """The steps of a length that is a valid text. steps: of the run."""
    match = re.fullmatch(LENGTH_PATTERN, text)
    assert match is not None, text
    tokens, percent = match.groups()
    return steps_of_tokens(int(tokens)) if tokens else round(float(Fraction(percent) / 100) * steps)


def in_steps(length: Length) -> int:
    """A resolved length."""
    assert isinstance(length, int), length
    return length
