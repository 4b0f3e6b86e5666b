"""The numbers of a validation: means, values derived from them, and omitted keys."""

import json
import math
from dataclasses import replace

import pytest

from titanlite.metrics.console import validation_line
from titanlite.metrics.jsonl import json_line
from titanlite.metrics.records import ValidationRecord, is_validation
from titanlite.metrics.scores import SetTotals, score_cloze, sum_of

CODE, TEXT, EMPTY = SetTotals(20.0, 10, 40), SetTotals(90.0, 30, 60), SetTotals(0.0, 0, 0)


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


def test_another_loss_has_no_numbers_in_nats() -> None:
    record = ValidationRecord(7, {"code": replace(CODE, in_nats=False), "text": replace(TEXT, in_nats=False)}, 1.5, 0)
    assert [key for key in record.row() if "loss" not in key] == ["step", "validation/num_valid", "validation/time_s"]
    assert validation_line(record) == "validation after step 7: loss 2.7500, code 2.0000, text 3.0000 (2s)"


def test_tasks_have_keys_of_their_own_also_without_sources() -> None:
    scores = score_cloze([-math.log(2)] * 2, [True, False])
    row = ValidationRecord(7, {}, 1.5, 0, {"last word": scores}).row()
    assert row == {"step": 7, "validation/time_s": 1.5} | {
        f"validation/task/last word/{key}": pytest.approx(value)
        for key, value in {"acc": 0.5, "acc_stderr": 0.5, "perplexity": 2.0, "perplexity_stderr": 0.0}.items()
    }
    assert is_validation(row)
    alone = ValidationRecord(7, {}, 1.5, 0, {"last word": scores})
    text = "last word acc 50.0% ± 50.0%, perplexity 2 ± 0"
    assert validation_line(alone) == f"validation after step 7: {text} (2s)"
    both = ValidationRecord(7, {"code": CODE}, 1.5, 0, {"last word": scores})
    assert validation_line(both).endswith(f"0.7213 bits/byte, {text} (2s)")


def test_a_single_source_has_no_keys_by_source() -> None:
    row = ValidationRecord(7, {"code": CODE}, 1.5, 0).row()
    assert not [key for key in row if "code" in key]


def test_bytes_unknown_for_one_source_are_unknown_for_the_sum() -> None:
    assert sum_of([CODE, SetTotals(1.0, 1, None)]) == SetTotals(21.0, 11, None)
    assert sum_of([CODE, EMPTY]) == CODE


def test_a_source_without_text_keeps_the_bytes_of_other_sources() -> None:
    only_eos = SetTotals(1.0, 1, 0)
    assert "bits_per_byte" not in only_eos.numbers()
    assert sum_of([CODE, only_eos]).num_bytes == CODE.num_bytes


def test_conversations_that_are_too_long_are_counted_by_source() -> None:
    sets = {"chat": replace(TEXT, too_long=3), "skipped": replace(EMPTY, too_long=2), "code": CODE}
    record = ValidationRecord(7, sets, 1.5, 0)
    counts = {key: value for key, value in record.row().items() if "too_long" in key}
    assert counts == {"validation/too_long/chat": 3, "validation/too_long/skipped": 2}
    assert validation_line(record).endswith(", chat 3.0000, code 2.0000, too long 5 (2s)")
    assert sum_of([CODE]).too_long is None


@pytest.mark.parametrize(("loss", "perplexity"), [(1e6, math.inf), (math.nan, math.nan)])
def test_non_finite_values_are_written(loss: float, perplexity: float) -> None:
    record = ValidationRecord(1, {"a": SetTotals(loss, 1, 0)}, 1.0, 0)
    row = json.loads(json_line(record.row()))
    assert float(row["validation/loss"]) == pytest.approx(loss, nan_ok=True)
    assert float(row["validation/perplexity"]) == pytest.approx(perplexity, nan_ok=True)


def test_console_line() -> None:
    record = ValidationRecord(300, {"code": CODE, "text": TEXT}, 75.0, 0)
    assert validation_line(record) == (
        "validation after step 300: loss 2.7500, perplexity 15.64, 1.5870 bits/byte, code 2.0000, text 3.0000 (1m 15s)"
    )
    early = ValidationRecord(300, {"code": SetTotals(80.0, 10, 0)}, 0.4, 0)
    assert validation_line(early) == "validation after step 300: loss 8.0000, perplexity 2,981 (0s)"
    unknown = ValidationRecord(300, {"code": SetTotals(20.0, 10, 0)}, 0.4, 0)
    assert validation_line(unknown) == "validation after step 300: loss 2.0000, perplexity 7.39 (0s)"
