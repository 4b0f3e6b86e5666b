"""Numbers with their nouns, and ranges, as messages write them."""

import math

import pytest

from titanlite.config.schema import TrainingConfig
from titanlite.runtime.errors import Rules
from titanlite.runtime.settings import Range
from titanlite.runtime.text import counted


def test_a_number_and_its_noun() -> None:
    assert [counted(n, "file") for n in (0, 1, 2, 2000)] == ["0 files", "1 file", "2 files", "2,000 files"]
    assert [counted(n, "microbatch") for n in (1, 2)] == ["1 microbatch", "2 microbatches"]


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ({"above": 0, "below": math.inf}, "a finite number above 0"),
        ({"least": 0, "below": math.inf}, "a finite number, 0 or more"),
        ({"above": 1, "below": math.inf, "unset": 0}, "0 or a finite number above 1"),
        ({"least": 0, "below": 1}, "at least 0 and below 1"),
        ({"least": 0}, "0 or more"),
    ],
)
def test_a_range(bounds: dict[str, float], text: str) -> None:
    assert str(Range("", **bounds)) == text


def test_rules_name_the_key_and_take_its_value() -> None:
    rules = Rules("training", TrainingConfig(seq_len=10))
    assert rules.divides("seq_len", "parallelism.tp", 5)
    assert not rules.divides("seq_len", "parallelism.tp", 4)
    assert not rules.needs("steps", False, "a wish")
    first, second = rules.problems
    assert (first.key, first.value, first.rule) == ("training.seq_len", 10, "divisible by parallelism.tp = 4")
    assert first.remedy == "set training.seq_len = 8 or 12, or change parallelism.tp"
    assert (second.key, second.rule, second.remedy) == ("training.steps", "only with a wish", "leave it out")
    options = Rules("--", TrainingConfig())
    options.require("seq_len", False, "", "")
    assert options.problems[0].key == "--seq-len"
