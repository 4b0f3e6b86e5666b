"""The report of a replay."""

import math
from collections.abc import Iterator, Sequence

from titanlite.faults.record import Record, RecordedStep
from titanlite.runtime.text import aligned
from titanlite.tools.replay.compare import GRAD_NORM, LOSS, Verdict
from titanlite.tools.replay.compute import Replayed
from titanlite.tools.sequences import printable

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
        yield f"\nloss per token, the largest {len(worst)} of {len(replayed.rows)} sequences"
    for row in worst:
        about = replayed.rows[row]
        losses = ", ".join(f"{name} {_per_token(step, replayed, row):.6g}" for name, step in steps.items())
        yield f"  sequence {own.first_sequence + row}, {about.place}, {about.num_valid} valid tokens: {losses}"
        yield f"    {' '.join(printable(about.text[:SHOWN_CHARACTERS]).split())}"
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
