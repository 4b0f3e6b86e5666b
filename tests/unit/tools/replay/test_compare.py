"""What a replay concludes from the numbers of the record, of the run's dtypes and of float64."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from titanlite.faults.record import Record, RecordedStep
from titanlite.tools.replay.compare import Verdict, judge
from titanlite.tools.replay.compute import Replayed

CODE = {"torch": "2.13.0", "titanlite/loss.py": "sha256 1", "module one": "sha256 2"}
EXACT = RecordedStep(9, 50, False, 2.0, {"a": 1.0, "b": math.sqrt(3.0), "c": 1e-7}, [0.5, 1.5], 72)


def scaled(step: RecordedStep, error: float, number: int = 9) -> RecordedStep:
    norms = {name: norm * (1 + error) for name, norm in step.gradient_norms.items()}
    return replace(step, step=number, gradient_norms=norms)


OWN = scaled(EXACT, 1e-7)
BROKEN = replace(OWN, grad_norm=math.nan, gradient_norms=OWN.gradient_norms | {"b": math.inf})


def verdict(
    recorded: list[RecordedStep], own: RecordedStep = OWN, exact: RecordedStep = EXACT, earlier: tuple[int, ...] = ()
) -> Verdict:
    """earlier: numbers of the steps that were computed again, all with the numbers of OWN."""
    record = Record(Path("record"), {"code": CODE}, {step.step: step for step in recorded})
    replayed = Replayed(own, exact, [replace(OWN, step=number) for number in earlier], [])
    now = CODE | {"titanlite/loss.py": "sha256 3", "module two": "sha256 4"}
    return judge(replayed, [record] if recorded else [], ("float32", "bfloat16"), now)


@pytest.mark.parametrize("error", [0.0, 1e-3, -1e-3])
def test_a_difference_within_rounding_is_reproduced(error: float) -> None:
    found = verdict([scaled(OWN, error)])
    assert found.reproduced
    assert found.lines[0].startswith("reproduced (")
    assert found.differences["c"] <= 1e-6, "relative to the global norm"


def test_a_larger_difference_is_named_with_what_has_changed() -> None:
    wrong = replace(OWN, gradient_norms=OWN.gradient_norms | {"b": 1.9})
    found = verdict([wrong])
    assert not found.reproduced
    assert found.lines[:2] == [
        "NOT reproduced: step 9 (b differs most, by 9.7e-02; allowed: 3.1e-02)",
        "  changed since the run: titanlite/loss.py",
    ]
    found = verdict([replace(OWN, num_valid=49)])
    assert found.lines[1] == "  the run counted 49 valid tokens, this computation 50: other data"


def test_the_first_step_that_differs_is_named_and_slow_growth_is_no_difference() -> None:
    grown = [scaled(OWN, error, number) for number, error in ((6, 0.002), (7, 0.015), (8, 0.12), (9, 0.4))]
    assert verdict(grown, earlier=(6, 7, 8)).reproduced
    jumped = [scaled(OWN, error, number) for number, error in ((6, 0.0), (7, 0.0), (8, 0.1), (9, 0.1))]
    found = verdict(jumped, earlier=(6, 7, 8))
    assert not found.reproduced
    assert "it is the first step that differs: replay it instead of step 9" in found.lines[1]
    assert found.differences["a"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("errors", "conclusion"),
    [
        ({9: 0.2}, "undecided ("),
        ({9: 0.001}, "reproduced ("),
        ({8: 0.5, 9: 0.5}, "undecided ("),
        ({8: 0.001, 9: 0.02}, "reproduced ("),
        ({}, "no record of step 9: each launch records its last 100 steps"),
    ],
)
def test_steps_without_a_record_decide_nothing_until_the_numbers_agree(
    errors: dict[int, float], conclusion: str
) -> None:
    """Steps 7 and 8 were computed again. errors: of the steps with a record, relative."""
    found = verdict([scaled(OWN, error, number) for number, error in errors.items()], earlier=(7, 8))
    assert found.lines[0].startswith(conclusion)
    assert found.reproduced == conclusion.startswith("reproduced")
    assert len(found.lines) == 1


def test_numbers_that_are_not_finite() -> None:
    found = verdict([BROKEN], own=BROKEN)
    assert found.reproduced
    assert found.lines[0] == (
        "the gradient of b is not finite in float32/bfloat16, but it is in float64: overflow or rounding"
    )
    found = verdict([BROKEN])
    assert not found.reproduced
    assert "grad norm differs most, by inf" in found.lines[0]
    nan = replace(BROKEN, row_losses=[0.5, math.nan])
    found = verdict([nan], own=nan, exact=nan)
    assert found.reproduced
    assert found.lines[1].startswith("reproduced: the same numbers are not finite; of the others, ")
    assert found.lines[0].startswith("the loss of sequence 73 is not finite in float64 either: the cause is in the")
