"""The numbers of a validation: means, what follows from them, and what is left out."""

import json
import math

import pytest

from titanlite.metrics.sinks import json_line, validation_line
from titanlite.metrics.validation import SetTotals, ValidationRecord, is_validation, sum_of

CODE, TEXT, NONE = SetTotals(20.0, 10, 40), SetTotals(90.0, 30, 60), SetTotals(0.0, 0, 0)


def test_each_token_has_equal_weight() -> None:
    row = ValidationRecord(7, {"code": CODE, "text": TEXT, "none": NONE}, 1.5).row()
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


def test_one_source_is_the_whole() -> None:
    row = ValidationRecord(7, {"code": CODE}, 1.5).row()
    assert not [key for key in row if "code" in key]


def test_bytes_that_are_not_known_of_one_source_are_not_known_of_all() -> None:
    assert sum_of([CODE, SetTotals(1.0, 1, None)]) == SetTotals(21.0, 11, None)
    assert sum_of([CODE, NONE]) == CODE


def test_a_source_whose_targets_stand_for_no_text_takes_the_bytes_of_the_others_from_nobody() -> None:
    only_eos = SetTotals(1.0, 1, 0)
    assert "bits_per_byte" not in only_eos.numbers()
    assert sum_of([CODE, only_eos]).num_bytes == CODE.num_bytes


@pytest.mark.parametrize(("loss", "perplexity"), [(1e6, math.inf), (math.nan, math.nan)])
def test_what_is_not_finite_is_written_as_such(loss: float, perplexity: float) -> None:
    record = ValidationRecord(1, {"a": SetTotals(loss, 1, 0)}, 1.0)
    row = json.loads(json_line(record))
    assert float(row["validation/loss"]) == pytest.approx(loss, nan_ok=True)
    assert float(row["validation/perplexity"]) == pytest.approx(perplexity, nan_ok=True)


def test_the_line_for_a_person() -> None:
    record = ValidationRecord(300, {"code": CODE, "text": TEXT}, 75.0)
    assert validation_line(record) == (
        "validation after step 300 | loss 2.7500 | perplexity 15.64 | 1.5870 bits per byte | 40 tokens, 1m 15s | "
        "code 2.0000 | text 3.0000"
    )
    unknown = ValidationRecord(300, {"code": SetTotals(20.0, 10, 0)}, 0.4)
    assert validation_line(unknown) == "validation after step 300 | loss 2.0000 | perplexity 7.39 | 10 tokens, 0s"
