"""Agreement with the reference, the order of differences, and vacuous references."""

import math
from dataclasses import replace
from typing import Any

import pytest

from titanlite.tools.parity.compare import Result
from titanlite.tools.parity.layouts import ONE_PROCESS
from titanlite.tools.parity.measure import Measurement, Step
from titanlite.tools.parity.report import last_line
from titanlite.tools.parity.verdict import (
    FLOAT64_BOUND,
    RANKS_DISAGREE,
    Bounds,
    dead_parameters,
    errors_of,
    failed,
    judge,
    merge_ranks,
    own_bounds,
    vacuous,
)

REFERENCE = Measurement(
    {"a": "hash a", "b": "hash b", "c": "hash c"},
    [Step(2.0, 5.0, 7, False, {"0": "row 0", "1": "row 1"}, {"a": 3.0, "b": 4.0, "c": 1e-9})],
    dtypes=["float32", "bfloat16", "float32"],
)
SAME = replace(REFERENCE, steps=[replace(REFERENCE.steps[0], gradients={"a": 0.0, "b": 0.0, "c": 0.0})])
EXACT = Bounds(FLOAT64_BOUND)


def changed(**values: Any) -> Measurement:
    return replace(SAME, steps=[replace(SAME.steps[0], **values)])


def first_difference(measured: Measurement) -> str:
    """Of exact bounds; "" if there is none."""
    return judge(measured, REFERENCE, EXACT).first_difference or ""


def test_equal_measurements_agree() -> None:
    verdict = judge(SAME, REFERENCE, EXACT)
    assert verdict.first_difference is None
    assert (verdict.loss_difference, verdict.grad_norm_ratio, verdict.error) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("measured", "first"),
    [
        (
            replace(SAME, dtypes=["float32", "bfloat16", "bfloat16"]),
            "dtypes of parameters/compute/reduction: float32/bfloat16/bfloat16, and the configuration has float32/bfl",
        ),
        (replace(SAME, weights={**SAME.weights, "b": "x"}), "initial weights: b"),
        (replace(SAME, weights={"a": "hash a", "c": "hash c"}), "initial weights: b is missing on all ranks"),
        (replace(SAME, weights={**SAME.weights, "d": "x"}), "initial weights: d is missing in the reference"),
        (changed(rows={"0": "row 0", "1": "x"}), "step 1, tokens: sequence 1 of the run"),
        (changed(rows={"0": "row 0"}), "step 1, tokens: sequence 1 of the run is missing on all ranks"),
        (changed(num_valid=6), "step 1, valid tokens: 6, and the reference has 7"),
        (changed(loss=2.0 + 1e-9), "step 1, loss: 2, and the reference has 2: relative difference 5.0e-10, bound"),
        (changed(loss=math.nan), "step 1, loss: the ranks disagree"),
        (
            changed(flipped=1, routed=512),
            "step 1, choice of experts: 1 of 512 positions chose others, share 2.0e-03, bo",
        ),
        (changed(gradients={"a": 1e-9, "b": 1e-8, "c": 0.0}), "step 1, gradient of b: relative error 2.5e-09, bound"),
        (changed(gradients={"a": math.nan, "b": 0.0, "c": 0.0}), "step 1, gradient of a: relative error inf"),
        (changed(gradients={"a": 0.0, "b": 0.0, "c": None}), "step 1, gradient of c: missing on all ranks"),
        (changed(gradients={"a": 0.0, "b": 0.0}), "step 1, gradient of c: missing on all ranks"),
        (changed(grad_norm=10.0), "step 1, grad norm: 10, and the reference has 5: relative difference 1.0e+00"),
        (changed(grad_norm=math.inf), "step 1, grad norm: inf"),
        (changed(skipped=True), "step 1: the update was skipped"),
    ],
)
def test_each_difference_is_named(measured: Measurement, first: str) -> None:
    assert first_difference(measured).startswith(first)


@pytest.mark.parametrize(("text", "says"), [("step 1, loss: 2", True), ("step 1, grad norm: 2", False)])
def test_a_loss_of_other_logits_is_explained(text: str, says: bool) -> None:
    """Only the loss of one process says so: the reference has the same model without parallelism."""
    for layout in (ONE_PROCESS, replace(ONE_PROCESS, degrees=(1, 2, 1, 1, 1))):
        line = last_line([Result(layout, ("float64",) * 3, replace(failed(""), first_difference=text))])
        assert ("OutputLayer.transform" in line) == (says and layout == ONE_PROCESS)


def test_causes_come_before_effects() -> None:
    step = replace(
        SAME.steps[0], rows={}, num_valid=1, loss=9.0, gradients={"a": 1.0, "b": 1.0, "c": 1.0}, grad_norm=9.0
    )
    everything = replace(SAME, weights={**SAME.weights, "a": "x"}, steps=[step])
    fixes = ["weights", "rows", "num_valid", "loss", "gradients", "grad_norm"]
    starts = ["initial weights", "step 1, tokens", "step 1, valid", "step 1, loss", "step 1, gradient", "step 1, grad "]
    for fix, start in zip(fixes, starts, strict=True):
        assert first_difference(everything).startswith(start)
        if fix == "weights":
            everything = replace(everything, weights=SAME.weights)
        else:
            step = replace(step, **{fix: getattr(SAME.steps[0], fix)})
            everything = replace(everything, steps=[step])
    assert first_difference(everything) == ""


def test_the_error_of_a_tiny_gradient_is_relative_to_a_share_of_the_global_norm() -> None:
    (errors,) = errors_of(changed(gradients={"a": 3e-6, "b": 0.0, "c": 1e-9}), REFERENCE)
    assert errors.gradients["a"] == pytest.approx(1e-6)
    assert errors.gradients["c"] == pytest.approx(1e-9 / (1e-4 * 5.0))
    assert errors.gradients["c"] > FLOAT64_BOUND  # entirely wrong, and detected


def test_bounds_of_own_dtypes_follow_from_the_one_process_run() -> None:
    eps = 2.0**-7
    alone = own_bounds(("float32", "bfloat16", "float32"), None)
    assert alone.loss(0) == alone.gradient(0, "a") == 100 * eps
    assert own_bounds(("bfloat16",), None, "mine").loss(0) == 1000 * eps
    one_process = errors_of(changed(loss=2.2, grad_norm=5.5, gradients={"a": 0.3, "b": 0.0, "c": 0.0}), REFERENCE)
    bounds = own_bounds(("float32", "bfloat16", "float32"), one_process)
    assert bounds.gradient(0, "a") == pytest.approx(4 * 0.1 + 4 * eps)
    assert bounds.gradient(0, "b") == pytest.approx(4 * eps)
    assert bounds.loss(0) == bounds.grad_norm(0) == pytest.approx(4 * 0.1 + 4 * eps)


def test_ranks_are_merged() -> None:
    dtypes = ["float32"] * 3
    first = Measurement({"a": "x"}, [Step(1.0, 5.0, 7, False, {"0": "r"}, {"a": 0.5})], {}, dtypes)
    second = Measurement({"a": "x", "b": "y"}, [Step(0.5, 5.0, 7, True, {"1": "s"}, {"a": 0.25, "b": 1.0})], {}, dtypes)
    steps = [Step(1.5, 5.0, 7, True, {"0": "r", "1": "s"}, {"a": 0.5, "b": 1.0})]
    assert merge_ranks([first, second]) == Measurement({"a": "x", "b": "y"}, steps, {}, dtypes)
    assert merge_ranks([first, replace(second, dtypes=["float64"] * 3)]).dtypes == [RANKS_DISAGREE]


@pytest.mark.parametrize(
    ("values", "first"),
    [
        ({"rows": {"0": "x"}}, "step 1, tokens: sequence 0 of the run (the ranks disagree)"),
        ({"num_valid": 6}, "step 1, valid tokens: the ranks disagree"),
        ({"grad_norm": 5.000001}, "step 1, grad norm: the ranks disagree"),
    ],
)
def test_disagreeing_ranks_are_a_difference(values: dict[str, Any], first: str) -> None:
    assert first_difference(merge_ranks([SAME, changed(loss=0.0, **values)])).startswith(first)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"num_valid": 0}, "no valid token"),
        ({"loss": math.nan}, "not finite"),
        ({"gradients": {"a": math.inf, "b": 1.0, "c": 1.0}}, "not finite"),
        ({"loss": 0.0}, "exactly zero"),
        ({"grad_norm": 0.0}, "all gradients of step 1 are zero"),
        ({"gradients": {"a": 0.0, "b": 0.0, "c": 1.0}}, "2 of 3 parameters never get a gradient, a among them"),
    ],
)
def test_a_vacuous_reference_is_refused(values: dict[str, Any], reason: str) -> None:
    assert vacuous(REFERENCE) is None
    assert reason in (vacuous(replace(REFERENCE, steps=[replace(REFERENCE.steps[0], **values)])) or "")
    assert vacuous(replace(REFERENCE, steps=[])) == "no step was taken"


def test_a_parameter_with_a_gradient_in_a_later_step_is_not_dead() -> None:
    late = replace(REFERENCE.steps[0], gradients={"a": 0.0, "b": 0.0, "c": 1.0})
    assert dead_parameters(replace(REFERENCE, steps=[late])) == ["a", "b"]
    assert dead_parameters(replace(REFERENCE, steps=[late, REFERENCE.steps[0]])) == []


def test_bounds_of_choices_of_experts() -> None:
    """None in float64; below, a multiple of the one-process run's share, and two positions."""
    chose_others = changed(flipped=6, routed=600)
    one_process = errors_of(chose_others, REFERENCE)
    assert one_process[0].flipped == 0.01
    bounds = own_bounds(["float32"], one_process)
    assert bounds.flipped(0, 600) == pytest.approx(4 * 0.01 + 2 / 600, rel=1e-4)
    assert judge(changed(flipped=25, routed=600), REFERENCE, bounds).first_difference is None
    verdict = judge(changed(flipped=27, routed=600), REFERENCE, bounds)
    assert (verdict.first_difference or "").startswith("step 1, choice of experts: 27 of 600")
    assert verdict.flipped == 27 / 600
    assert judge(SAME, REFERENCE, bounds).flipped is None  # no experts
    assert EXACT.flipped(0, 600) == 0.0
    merged = merge_ranks([chose_others, chose_others])
    assert (merged.steps[0].flipped, merged.steps[0].routed) == (12, 1200)


def test_operands_of_float8_are_counted_one_by_one() -> None:
    one_process = errors_of(changed(operands={"x": (8, 800), "w": (0, 1600)}), REFERENCE)
    bounds = own_bounds(("float32",), one_process)
    assert bounds.operand(0, "x", 800) == pytest.approx(4 * 0.01 + 16 / 800, rel=1e-4)
    counts = {"x": (48, 800), "w": (17, 1600)}
    verdict = judge(changed(operands=counts), REFERENCE, bounds)
    assert verdict.first_difference == (
        "step 1, float8, w: 17 of 1600 are other numbers of E4M3, share 1.1e-02, bound 1.0e-02"
    )
    assert verdict.flipped_operands == 48 / 800
    merged = merge_ranks([changed(operands=counts), changed(operands={"x": (1, 100)})])
    assert merged.steps[0].operands == {"x": (49, 900), "w": (17, 1600)}
