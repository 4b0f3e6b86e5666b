"""Results of a validation, as they are logged."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from titanlite.metrics.tasks import TaskScores


@dataclass(frozen=True)
class SetTotals:
    """Sums over a data set.

    loss_sum: over num_valid targets. num_bytes: bytes of text of these targets; None if unknown. in_nats: whether the
    loss is the cross-entropy in nats. too_long: conversations longer than a sequence, truncated or skipped; None of
    documents.
    """

    loss_sum: float
    num_valid: int
    num_bytes: int | None
    in_nats: bool = True
    too_long: int | None = None

    def numbers(self) -> dict[str, float]:
        """Mean loss per target; of a cross-entropy, also perplexity and, if the bytes are known, bits per byte; {} if
        there is no target."""
        if not self.num_valid:
            return {}
        loss = self.loss_sum / self.num_valid
        numbers = {"loss": loss}
        if not self.in_nats:
            return numbers
        numbers["perplexity"] = math.inf if loss > 700 else math.exp(loss)  # exp would overflow
        if self.num_bytes:
            numbers["bits_per_byte"] = self.loss_sum / math.log(2) / self.num_bytes
        return numbers


def sum_of(sets: Iterable[SetTotals]) -> SetTotals:
    """Totals over all sets; num_bytes is None if it is unknown for one of the sets."""
    sets = list(sets)
    too_long = [totals.too_long for totals in sets if totals.too_long is not None]
    sets = [totals for totals in sets if totals.num_valid]
    sizes = [totals.num_bytes for totals in sets if totals.num_bytes is not None]
    return SetTotals(
        math.fsum(totals.loss_sum for totals in sets),
        sum(totals.num_valid for totals in sets),
        sum(sizes) if len(sizes) == len(sets) else None,
        all(totals.in_nats for totals in sets),
        sum(too_long) if too_long else None,
    )


@dataclass(frozen=True)
class ValidationRecord:
    """One row of metrics.jsonl: the model after `step`, on each source of the validation data and each task.

    time_s: duration of the validation. tokens_seen: see Record; not in the row. tasks: by name.
    """

    step: int
    by_source: Mapping[str, SetTotals]
    time_s: float
    tokens_seen: int
    tasks: Mapping[str, TaskScores] = field(default_factory=dict)

    def row(self) -> dict[str, int | float]:
        """validation/loss, … and, if there are several sources, validation/loss/NAME, …; validation/too_long/NAME of
        conversations; validation/task/NAME/acc, …; without unknown values."""
        total = sum_of(self.by_source.values())
        row: dict[str, int | float] = {"step": self.step}
        row |= {f"{PREFIX}{key}": value for key, value in total.numbers().items()}
        row |= {f"{PREFIX}num_valid": total.num_valid} if self.by_source else {}
        row[f"{PREFIX}time_s"] = self.time_s
        for name, totals in self.by_source.items() if len(self.by_source) > 1 else ():
            row |= {f"{PREFIX}{key}/{name}": value for key, value in totals.numbers().items()}
        for name, totals in self.by_source.items():
            row |= {} if totals.too_long is None else {f"{PREFIX}too_long/{name}": totals.too_long}
        for name, scores in self.tasks.items():
            row |= {f"{TASK_PREFIX}{name}/{key}": value for key, value in scores.numbers.items()}
        return row


PREFIX = "validation/"
"""Prefix of all keys of these rows except step."""
TASK_PREFIX = f"{PREFIX}task/"
"""Prefix of the keys of tasks: validation/task/NAME/acc."""


def is_validation(row: Mapping[str, object]) -> bool:
    """Whether a row of metrics.jsonl is a validation row."""
    return f"{PREFIX}loss" in row or f"{PREFIX}time_s" in row  # without sources there is no loss
