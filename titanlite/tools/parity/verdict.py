"""Decide whether a layout agrees with the reference. Pure functions of the measurements.

Errors are relative: |value - reference| / |reference| for loss and grad norm, ||value - reference|| / ||reference|| for
the gradient of a parameter. If the norm of a parameter's gradient is below SMALL_SHARE x the global gradient norm, the
error is relative to SMALL_SHARE x the global norm, since a value that is nearly zero by cancellation has no relative
precision.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from titanlite.models.losses import CROSS_ENTROPY
from titanlite.precision import DTYPES
from titanlite.tools.parity.measure import Measurement, Step

FLOAT64_BOUND = 1e-11
MULTIPLE = 4.0
FLOOR_EPS = 4.0
ONE_PROCESS_EPS = 100.0
REGISTERED_LOSS_EPS = 1000.0
"""The same with a registered loss, whose own rounding counts, too (docs/numerics.md)."""
SMALL_SHARE = 1e-4
RANKS_DISAGREE = "the ranks disagree"


@dataclass(frozen=True)
class StepErrors:
    """Relative errors of one step; infinite if a value is not finite. grad_norm_ratio: of the rank farthest from 1.
    flipped: share of the positions that chose other experts. operands: of each operand of
    float8, the share of its elements that are other numbers."""

    loss: float
    grad_norm: float
    grad_norm_ratio: float
    gradients: Mapping[str, float]
    flipped: float = 0.0
    operands: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Bounds:
    """The largest errors that count as agreement: multiple x the error of the one-process run, plus floor."""

    floor: float
    multiple: float = 0.0
    one_process: Sequence[StepErrors] = ()

    def loss(self, step: int) -> float:
        return self.floor + (self.multiple * self.one_process[step].loss if self.one_process else 0.0)

    def grad_norm(self, step: int) -> float:
        return self.floor + (self.multiple * self.one_process[step].grad_norm if self.one_process else 0.0)

    def gradient(self, step: int, name: str) -> float:
        return self.floor + (self.multiple * self.one_process[step].gradients[name] if self.one_process else 0.0)

    def flipped(self, step: int, routed: int) -> float:
        """For the share of `routed` positions that chose other experts: 0 in float64, else at least two positions."""
        if self.floor <= FLOAT64_BOUND:
            return 0.0
        of_one = self.multiple * self.one_process[step].flipped if self.one_process else 0.0
        return self.floor + of_one + 2 / max(routed, 1)

    def operand(self, step: int, name: str, compared: int) -> float:
        """For the share of the `compared` elements of an operand that are other numbers: at least 16 of them."""
        of_one = self.multiple * self.one_process[step].operands[name] if self.one_process else 0.0
        return self.floor + of_one + 16 / compared


def one_process_eps(loss: str) -> float:
    """The bound of the one-process run, by loss.name, in eps of the coarsest dtype."""
    return ONE_PROCESS_EPS if loss == CROSS_ENTROPY.name else REGISTERED_LOSS_EPS


def own_bounds(
    dtypes: Sequence[str], one_process: Sequence[StepErrors] | None, loss: str = CROSS_ENTROPY.name
) -> Bounds:
    """The bounds in a configuration's own dtypes. one_process: the errors of the one-process run; None: the bounds of
    that run itself, which depend only on its coarsest dtype and on loss.name."""
    eps = max(torch.finfo(DTYPES[name]).eps for name in dtypes)
    if one_process is None:
        return Bounds(one_process_eps(loss) * eps)
    return Bounds(FLOOR_EPS * eps, MULTIPLE, one_process)


@dataclass(frozen=True)
class Verdict:
    """The verdict on one layout. first_difference: None if everything agrees. The numbers are the worst over the steps;
    parameter: the one with the largest error relative to its bound. update_error: the worst over the parameters; None
    if updates were not measured. flipped: the share of the positions that chose other experts than in the reference;
    None without experts. flipped_operands: the largest share of the elements of an operand of float8 that are other
    numbers; None if operands were not compared."""

    first_difference: str | None
    loss_difference: float
    grad_norm_ratio: float
    parameter: str
    error: float
    bound: float
    update_error: float | None
    flipped: float | None
    flipped_operands: float | None
    errors: tuple[StepErrors, ...]


def failed(error: str) -> Verdict:
    """The verdict on a layout that did not run to its end."""
    return Verdict(f"it failed: {error}", math.inf, math.inf, "none", math.inf, 0.0, None, None, None, ())


def merge_ranks(ranks: Sequence[Measurement]) -> Measurement:
    """Merge the measurements of all ranks into one. Values that should be equal on two ranks but differ become
    RANKS_DISAGREE, NaN or -1."""
    weights: dict[str, str] = {}
    for rank in ranks:
        _merge_hashes(weights, rank.weights)
    steps = [_merge_steps(steps) for steps in zip(*(rank.steps for rank in ranks), strict=True)]
    dtypes = ranks[0].dtypes if all(rank.dtypes == ranks[0].dtypes for rank in ranks) else [RANKS_DISAGREE]
    return Measurement(weights, steps, _merge_norms([rank.updates for rank in ranks]), dtypes)


def _merge_hashes(merged: dict[str, str], found: Mapping[str, str]) -> None:
    for name, value in found.items():
        if merged.setdefault(name, value) != value:
            merged[name] = RANKS_DISAGREE


def _merge_steps(steps: Sequence[Step]) -> Step:
    rows: dict[str, str] = {}
    for step in steps:
        _merge_hashes(rows, step.rows)
    counts = {step.num_valid for step in steps}
    norms = {step.grad_norm for step in steps}
    return Step(
        loss=sum(step.loss for step in steps),
        grad_norm=norms.pop() if len(norms) == 1 else math.nan,
        num_valid=counts.pop() if len(counts) == 1 else -1,
        skipped=any(step.skipped for step in steps),
        rows=rows,
        gradients=_merge_norms([step.gradients for step in steps]),
        flipped=sum(step.flipped for step in steps),
        routed=sum(step.routed for step in steps),
        operands=_sum_counts([step.operands for step in steps]),
    )


def _sum_counts(ranks: Sequence[Mapping[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    merged: dict[str, tuple[int, int]] = {}
    for counts in ranks:
        for name, (flipped, compared) in counts.items():
            before = merged.get(name, (0, 0))
            merged[name] = before[0] + flipped, before[1] + compared
    return merged


def _merge_norms(ranks: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    merged: dict[str, float | None] = {}
    for norms in ranks:
        for name, value in norms.items():
            merged[name] = _larger(merged[name], value) if name in merged else value
    return merged


def _larger(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return None
    return max(_finite(one), _finite(other))


def errors_of(measured: Measurement, reference: Measurement) -> tuple[StepErrors, ...]:
    """The errors of each step. Both measurements have the same parameters."""
    errors = []
    for step, expected in zip(measured.steps, reference.steps, strict=True):
        gradients = _relative(step.gradients, expected.gradients)
        ratio = step.grad_norm / expected.grad_norm
        loss = abs(step.loss - expected.loss) / abs(expected.loss)
        flipped = step.flipped / max(step.routed, 1)
        operands = {name: count / max(compared, 1) for name, (count, compared) in step.operands.items()}
        errors.append(StepErrors(_finite(loss), _finite(abs(ratio - 1.0)), ratio, gradients, flipped, operands))
    return tuple(errors)


def _relative(differences: Mapping[str, float | None], expected: Mapping[str, float | None]) -> dict[str, float]:
    """Norms of differences relative to those expected, by name."""
    norms = {name: norm or 0.0 for name, norm in expected.items()}
    least = SMALL_SHARE * math.sqrt(sum(norm * norm for norm in norms.values()))
    return {
        name: _finite(difference / max(norms[name], least))
        for name, difference in differences.items()
        if difference is not None and name in norms
    }


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def judge(measured: Measurement, reference: Measurement, bounds: Bounds) -> Verdict:
    """Judge a layout. measured: merged over ranks. reference: not vacuous; its weights are hashed in the same dtype."""
    errors = errors_of(measured, reference)
    ranked = [
        (error / bounds.gradient(index, name), error, name, bounds.gradient(index, name))
        for index, step in enumerate(errors)
        for name, error in step.gradients.items()
    ]
    _, error, parameter, bound = max(ranked, default=(math.inf, math.inf, "none", 0.0))
    return Verdict(
        next(differences(measured, reference, errors, bounds), None),
        max(step.loss for step in errors),
        max((step.grad_norm_ratio for step in errors), key=lambda ratio: _finite(abs(ratio - 1.0))),
        parameter,
        error,
        bound,
        max(_relative(measured.updates, reference.updates).values(), default=None),
        max(step.flipped for step in errors) if any(step.routed for step in measured.steps) else None,
        max((share for step in errors for share in step.operands.values()), default=None),
        errors,
    )


def differences(
    measured: Measurement, reference: Measurement, errors: Sequence[StepErrors], bounds: Bounds
) -> Iterator[str]:
    """All differences, causes before effects."""
    if measured.dtypes != reference.dtypes:
        running, configured = ("/".join(each.dtypes) for each in (measured, reference))
        yield f"dtypes of parameters/compute/reduction: {running}, and the configuration has {configured}"
    yield from _different_hashes("initial weights: {}", measured.weights, reference.weights)
    for index, (step, expected, error) in enumerate(zip(measured.steps, reference.steps, errors, strict=True)):
        at = f"step {index + 1}"
        yield from _different_hashes(f"{at}, tokens: sequence {{}} of the run", step.rows, expected.rows)
        if step.num_valid != expected.num_valid:
            counted = RANKS_DISAGREE if step.num_valid < 0 else str(step.num_valid)
            yield f"{at}, valid tokens: {counted}, and the reference has {expected.num_valid}"
        if not error.flipped <= bounds.flipped(index, step.routed):
            yield (
                f"{at}, choice of experts: {step.flipped} of {step.routed} positions chose others, share "
                f"{error.flipped:.1e}, bound {bounds.flipped(index, step.routed):.1e}"
            )
        for name, (flipped, compared) in step.operands.items():
            share, bound = error.operands[name], bounds.operand(index, name, compared)
            if not share <= bound:
                numbers = f"{flipped} of {compared} are other numbers of E4M3"
                yield f"{at}, float8, {name}: {numbers}, share {share:.1e}, bound {bound:.1e}"
        if not error.loss <= bounds.loss(index):
            yield f"{at}, loss: {_numbers(step.loss, expected.loss, error.loss, bounds.loss(index))}"
        yield from _different_gradients(at, index, step, expected, error, bounds)
        if not error.grad_norm <= bounds.grad_norm(index):
            numbers = _numbers(step.grad_norm, expected.grad_norm, error.grad_norm, bounds.grad_norm(index))
            yield f"{at}, grad norm: {numbers}"
        if step.skipped:
            yield f"{at}: the update was skipped"
    updates = _relative(measured.updates, reference.updates)
    for name in reference.updates:
        if name not in updates:
            yield f"update of {name}: missing on all ranks, or of a different shape"
        elif not updates[name] <= FLOAT64_BOUND:
            numbers = f"relative error {updates[name]:.1e}, bound {FLOAT64_BOUND:.0e}"
            yield f"update of {name}, given equal gradients: {numbers}"


def _different_hashes(text: str, found: Mapping[str, str], expected: Mapping[str, str]) -> Iterator[str]:
    for name in [*expected, *(extra for extra in found if extra not in expected)]:
        if name not in found:
            yield f"{text.format(name)} is missing on all ranks"
        elif name not in expected:
            yield f"{text.format(name)} is missing in the reference"
        elif found[name] != expected[name]:
            yield text.format(name) + (f" ({RANKS_DISAGREE})" if found[name] == RANKS_DISAGREE else "")


def _different_gradients(
    at: str, index: int, step: Step, expected: Step, error: StepErrors, bounds: Bounds
) -> Iterator[str]:
    """The missing gradients, and the worst error with the number of others above their bounds."""
    absent = [name for name in expected.gradients if step.gradients.get(name) is None]
    if absent:
        yield f"{at}, gradient of {absent[0]}: missing on all ranks, or of a different shape"
    excess = {name: value / bounds.gradient(index, name) for name, value in error.gradients.items()}
    over = [name for name, value in excess.items() if not value <= 1.0]
    if over:
        worst = max(over, key=lambda name: excess[name])
        others = f", and {len(over) - 1} other{'s' if len(over) != 2 else ''}" if len(over) > 1 else ""
        bound = bounds.gradient(index, worst)
        yield f"{at}, gradient of {worst}: relative error {error.gradients[worst]:.1e}, bound {bound:.1e}{others}"


def _numbers(value: float, expected: float, error: float, bound: float) -> str:
    shown = RANKS_DISAGREE if math.isnan(value) else f"{value:.9g}"
    return f"{shown}, and the reference has {expected:.9g}: relative difference {error:.1e}, bound {bound:.1e}"


def vacuous(reference: Measurement) -> str | None:
    """Why agreement with this reference would prove nothing; None if it is meaningful."""
    if not reference.steps:
        return "no step was taken"
    for index, step in enumerate(reference.steps):
        if step.num_valid == 0:
            return f"step {index + 1} has no valid token"
        values = [step.loss, step.grad_norm, *(norm or 0.0 for norm in step.gradients.values())]
        if not all(map(math.isfinite, values)):
            return f"step {index + 1} of the reference has a loss or gradient that is not finite"
        if step.loss == 0.0:
            return f"the loss of step {index + 1} is exactly zero"
        if step.grad_norm == 0.0:
            return f"all gradients of step {index + 1} are zero"
    dead = dead_parameters(reference)
    if 2 * len(dead) > len(reference.weights):
        return f"{len(dead)} of {len(reference.weights)} parameters never get a gradient, {dead[0]} among them"
    return None


def dead_parameters(reference: Measurement) -> list[str]:
    """Parameters whose gradient is zero in every step, so that the comparison does not test them."""
    return [name for name in reference.weights if not any(step.gradients[name] for step in reference.steps)]
