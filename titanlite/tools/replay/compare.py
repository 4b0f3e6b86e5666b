"""Compare a step with its record, say what that means, and report it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from titanlite.faults.record import MAX_RECORDS, RECORDED_STEPS, Record, RecordedStep
from titanlite.precision import DTYPES
from titanlite.ranks.agreement import MODULE
from titanlite.runtime.text import aligned
from titanlite.tools.parity.verdict import FLOOR_EPS, MULTIPLE, SMALL_SHARE
from titanlite.tools.replay.compute import Replayed

GROWTH = 10.0
"""Rounding errors in the weights grow by less than this from step to step; a fault is a larger jump."""

MAX_CHANGED = 5
"""Changed files and settings that the report lists."""

MAX_ALLOWED = 0.5
"""A larger relative difference is never rounding."""

LOSS = "loss"
GRAD_NORM = "grad norm"


@dataclass(frozen=True)
class Verdict:
    """reproduced: whether the record agrees with the step computed here in the run's dtypes. differences: of the latest
    record by name, relative, LOSS and GRAD_NORM included; {} without a record. lines: what follows from them."""

    reproduced: bool
    differences: dict[str, float]
    lines: list[str]


def judge(replayed: Replayed, records: Sequence[Record], dtypes: Sequence[str], code: Mapping[str, str]) -> Verdict:
    """Compare the step with its latest record. dtypes: the run's. code: of this process, see code_facts.

    records: of all launches, the latest first. Given equal weights, differences are bounded by a multiple of those
    between the run's dtypes and float64 on one process. Steps that were computed again leave weights that differ by
    rounding; the differences then grow slowly. After a step without a record, weights are known to be equal only once
    the numbers agree within the first bound.
    """
    own = replayed.own
    lines = list(_not_finite(replayed, dtypes))
    by_step = {step: record for record in reversed(records) for step in record.steps}
    if own.step not in by_step:
        lines.append(
            f"no record of step {own.step}: each launch records its last {RECORDED_STEPS} steps, and the "
            f"last {MAX_RECORDS} launches are kept"
        )
        return Verdict(False, {}, lines)
    eps = max(torch.finfo(DTYPES[name]).eps for name in dtypes)
    rounding = [error for error in differences(own, replayed.exact).values() if math.isfinite(error)]
    bound = limit = min(FLOOR_EPS * eps + MULTIPLE * max(rounding, default=0.0), MAX_ALLOWED)
    is_known = True  # whether the weights are those of the run, up to rounding
    for step in (*replayed.earlier, own):
        record = by_step.get(step.step)
        if record is None:
            is_known, limit = False, bound
            continue
        found = differences(record.steps[step.step], step)
        worst = max(found, key=lambda name: found[name])
        numbers = f"{worst} differs most, by {found[worst]:.1e}; allowed: {limit:.1e}"
        agrees = found[worst] <= limit and record.steps[step.step].num_valid == step.num_valid
        if is_known and not agrees:
            lines += _not_reproduced(record, step, own.step, numbers, code)
            return Verdict(False, differences(by_step[own.step].steps[own.step], own), lines)
        if agrees:
            is_known, limit = True, min(max(bound, GROWTH * found[worst]), MAX_ALLOWED)
    if not is_known:
        lines.append(
            f"undecided ({numbers}): earlier steps were computed again without a record of them, in which rounding may "
            "have grown this far; a smaller checkpoint.interval would decide"
        )
    elif _is_finite(own):
        lines.append(f"reproduced ({numbers}): the run's hardware and layout are not the cause")
    else:
        lines.append(f"reproduced: the same numbers are not finite; of the others, {numbers}")
    return Verdict(is_known, found, lines)


def _not_finite(replayed: Replayed, dtypes: Sequence[str]) -> Iterator[str]:
    """What the two computations say without the record, if something is not finite."""
    own, exact = replayed.own, replayed.exact
    if not _is_finite(exact):
        rows = [index for index, loss in enumerate(exact.row_losses) if not math.isfinite(loss)]
        what = f"the loss of sequence {exact.first_sequence + rows[0]}" if rows else "a gradient"
        yield f"{what} is not finite in float64 either: the cause is in the data, the weights or the model's code"
    elif not _is_finite(own):
        names = [name for name, norm in own.gradient_norms.items() if not math.isfinite(norm)]
        what = f"the gradient of {names[0]}" if names else "the loss"
        yield f"{what} is not finite in {'/'.join(dict.fromkeys(dtypes))}, but it is in float64: overflow or rounding"


def _not_reproduced(
    record: Record, step: RecordedStep, last: int, numbers: str, code: Mapping[str, str]
) -> Iterator[str]:
    """What to make of a step that differs. last: the step that was asked for."""
    yield f"NOT reproduced: step {step.step} ({numbers})"
    recorded = record.steps[step.step]
    if recorded.num_valid != step.num_valid:
        yield f"  the run counted {recorded.num_valid} valid tokens, this computation {step.num_valid}: other data"
    if step.step != last:
        yield f"  it is the first step that differs: replay it instead of step {last}"
    then = record.about["code"]
    changed = [name for name in sorted({*then, *code}) if then.get(name) != code.get(name)]
    # The commands import different modules: only those of both are compared.
    changed = [name for name in changed if not name.startswith(MODULE) or {name} <= then.keys() & code.keys()]
    if changed:
        more = f" and {len(changed) - MAX_CHANGED} more" if len(changed) > MAX_CHANGED else ""
        yield f"  changed since the run: {', '.join(changed[:MAX_CHANGED])}{more}"
    else:
        yield "  code, versions and environment are those of the run"
    yield (
        "  possible causes: hardware (memory, device or network of a rank); this layout, which titanlite parity "
        "checks; other kernels here than on the run's devices"
    )


def differences(found: RecordedStep, expected: RecordedStep) -> dict[str, float]:
    """Relative difference of the mean loss, of the gradient norm, and of each parameter's gradient norm.

    A norm below SMALL_SHARE of the global norm is compared relative to that share. Infinite if only one of two values
    is finite; 0 if neither is.
    """
    least = SMALL_SHARE * expected.grad_norm if math.isfinite(expected.grad_norm) else 0.0
    return {
        LOSS: _difference(sum(found.row_losses), sum(expected.row_losses), 0.0),
        GRAD_NORM: _difference(found.grad_norm, expected.grad_norm, 0.0),
    } | {
        name: _difference(found.gradient_norms.get(name, math.nan), norm, least)
        for name, norm in expected.gradient_norms.items()
    }


def _difference(found: float, expected: float, least: float) -> float:
    finite = math.isfinite(found) + math.isfinite(expected)
    if finite < 2:
        return math.inf if finite else 0.0
    scale = max(abs(expected), least)
    return abs(found - expected) / scale if scale else math.inf if found else 0.0


def _is_finite(step: RecordedStep) -> bool:
    return all(map(math.isfinite, (step.grad_norm, *step.gradient_norms.values(), *step.row_losses)))


SHOWN_PARAMETERS = 8
SHOWN_CHARACTERS = 300
"""Of a sequence's text."""


def report_lines(
    records: Sequence[Record], replayed: Replayed, verdict: Verdict, dtypes: str, sequences: int
) -> Iterator[str]:
    """The report; the verdict comes last. dtypes: the run's. sequences: number of sequences to show."""
    own, exact = replayed.own, replayed.exact
    for number, record in enumerate(records):
        devices = f"{record.about['world_size']} x {record.about['device']}"
        yield f"{_column(number)}: {record.file}, of the launch at {record.file.stem} on {devices}"
    steps = {_column(number): record.steps[own.step] for number, record in enumerate(records)}
    steps |= {f"here, {dtypes}": own, "here, float64": exact}
    rows = {
        LOSS: [sum(step.row_losses) for step in steps.values()],
        GRAD_NORM: [step.grad_norm for step in steps.values()],
    }
    names = sorted(own.gradient_norms, key=lambda name: -_interest(name, replayed, verdict))
    for name in names[:SHOWN_PARAMETERS]:
        rows[name] = [step.gradient_norms.get(name, math.nan) for step in steps.values()]
    table = [["", *steps, "difference"]]
    for name, values in rows.items():
        difference = f"{verdict.differences[name]:.1e}" if verdict.differences else "-"
        table.append([name, *(f"{value:.8g}" for value in values), difference])
    yield from ("", *aligned(table, left=1))
    if len(names) > SHOWN_PARAMETERS:
        yield f"and the gradient norms of {len(names) - SHOWN_PARAMETERS} parameters that differ less"
    worst = sorted(range(len(replayed.rows)), key=lambda row: -_per_token(exact, replayed, row))[:sequences]
    if worst:
        yield ""
        yield f"loss per token, the largest {len(worst)} of {len(replayed.rows)} sequences"
    for row in worst:
        about = replayed.rows[row]
        losses = ", ".join(f"{name} {_per_token(step, replayed, row):.6g}" for name, step in steps.items())
        yield f"  sequence {own.first_sequence + row}, {about.place}, {about.num_valid} valid tokens: {losses}"
        yield f"    {' '.join(about.text[:SHOWN_CHARACTERS].split())}"
    yield ""
    yield from verdict.lines


def _column(number: int) -> str:
    return "record" if number == 0 else f"record {number + 1}"


def _interest(name: str, replayed: Replayed, verdict: Verdict) -> float:
    """Parameters to show first: norms that are not finite, then those that differ most from the record."""
    finite = math.isfinite(replayed.own.gradient_norms[name]) and math.isfinite(replayed.exact.gradient_norms[name])
    return verdict.differences.get(name, 0.0) if finite else math.inf


def _per_token(step: RecordedStep, replayed: Replayed, row: int) -> float:
    """Mean loss per valid token of a sequence; infinite if it is not finite."""
    loss = step.row_losses[row] * step.num_valid / max(replayed.rows[row].num_valid, 1)
    return loss if math.isfinite(loss) else math.inf
