"""Scores of validations and tasks, by closed forms: their rows and their lines on the console."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from titanlite.metrics.jsonl import json_line
from titanlite.metrics.loggers import validation_line
from titanlite.metrics.records import ValidationRecord, is_validation
from titanlite.metrics.scores import SetTotals, TaskScores, sum_of

CODE, TEXT, EMPTY = SetTotals(20.0, 10, 40), SetTotals(90.0, 30, 60), SetTotals(0.0, 0, 0)
OF_TASK = {"acc": 0.5, "acc_stderr": 0.25, "perplexity": 2.0}
TASK = {"last word": TaskScores(4, 0, 3, OF_TASK), "part": TaskScores(2, 0, 0, OF_TASK, in_group=True)}


def test_each_token_has_equal_weight() -> None:
    row = ValidationRecord(7, {"code": CODE, "text": TEXT, "empty": EMPTY}, 1.5, 0).row()
    assert row == {
        "step": 7,
        "validation/loss": 110 / 40,
        "validation/perplexity": math.exp(110 / 40),
        "validation/bits_per_byte": 110 / math.log(2) / 100,
        "validation/num_valid": 40,
        "validation/time_s": 1.5,
        "validation/loss/code": 2.0,
        "validation/perplexity/code": math.exp(2.0),
        "validation/bits_per_byte/code": 20 / math.log(2) / 40,
        "validation/loss/text": 3.0,
        "validation/perplexity/text": math.exp(3.0),
        "validation/bits_per_byte/text": 90 / math.log(2) / 60,
    }
    assert is_validation(row)
    assert not is_validation({"step": 7, "loss": 1.0})


@pytest.mark.parametrize(
    ("sets", "tasks", "keys", "line"),
    [
        ({"code": CODE}, {}, ["loss", "perplexity", "bits_per_byte", "num_valid"], "perplexity 7.39, 0.7213 bits/byte"),
        (
            {"code": replace(CODE, in_nats=False), "text": replace(TEXT, in_nats=False)},
            *({}, ["loss", "num_valid", "loss/code", "loss/text"], "loss 2.7500, code 2.0000, text 3.0000"),
        ),
        ({}, TASK, [], "7: last word acc 50.0% ± 25.0%, perplexity 2 (3 close) (1m"),
        (
            {"code": CODE},
            *(TASK, ["loss", "perplexity", "bits_per_byte", "num_valid"], "0.7213 bits/byte, last word acc 50.0% ± "),
        ),
        (
            {
                "chat": replace(EMPTY, too_long=3),
                "skipped": replace(EMPTY, too_long=2),
                "code": replace(CODE, num_bytes=0),
            },
            {},
            ["loss", "perplexity", "num_valid", "loss/code", "perplexity/code", "too_long/chat", "too_long/skipped"],
            "loss 2.0000, perplexity 7.39, code 2.0000, too long 5",
        ),
        ({"code": SetTotals(80.0, 10, 0)}, {}, ["loss", "perplexity", "num_valid"], "loss 8.0000, perplexity 2,981"),
    ],
)
def test_unknown_numbers_are_left_out(
    sets: Mapping[str, SetTotals], tasks: Mapping[str, TaskScores], keys: list[str], line: str
) -> None:
    """A single source has no keys of its own; another loss than the cross-entropy no numbers in nats."""
    record = ValidationRecord(7, sets, 75.0, 0, tasks)
    row = record.row()
    of_tasks = {f"validation/task/{name}/{key}": value for name in tasks for key, value in OF_TASK.items()}
    assert {*row} == {"step", "validation/time_s", *(f"validation/{key}" for key in keys), *of_tasks}
    assert {key: row[key] for key in of_tasks} == pytest.approx(of_tasks)
    counts = {key: value for key, value in row.items() if "too_long" in key}
    assert counts == ({"validation/too_long/chat": 3, "validation/too_long/skipped": 2} if "chat" in sets else {})
    assert is_validation(row)
    text = validation_line(record)
    assert text.startswith("validation after step 7: ")
    assert text.endswith(" (1m 15s)")
    assert line in text


@pytest.mark.parametrize(
    ("sets", "total"),
    [
        ([CODE, SetTotals(1.0, 1, None)], SetTotals(21.0, 11, None)),  # unknown bytes
        ([CODE, EMPTY], CODE),
        ([CODE, SetTotals(1.0, 1, 0)], SetTotals(21.0, 11, 40)),  # a source without text
        ([replace(CODE, too_long=3), TEXT], SetTotals(110.0, 40, 100, too_long=3)),
    ],
)
def test_the_sum_of_sets(sets: list[SetTotals], total: SetTotals) -> None:
    assert sum_of(sets) == total


@pytest.mark.parametrize(("loss", "perplexity"), [(1e6, math.inf), (math.nan, math.nan)])
def test_non_finite_values_are_written(loss: float, perplexity: float) -> None:
    record = ValidationRecord(1, {"a": SetTotals(loss, 1, 0)}, 1.0, 0)
    row = json.loads(json_line(record.row()))
    assert float(row["validation/loss"]) == pytest.approx(loss, nan_ok=True)
    assert float(row["validation/perplexity"]) == pytest.approx(perplexity, nan_ok=True)
