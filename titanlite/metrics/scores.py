"""Scores of data sets and tasks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field


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
class TaskScores:
    """The result of one task, or of a group of tasks. num_truncated: requests that lost the first tokens of their
    context. num_close: documents whose two best choices are almost equally likely.

    numbers: the metrics of the task, each with its standard error NAME_stderr if that is known; bits_per_byte of the
    right answers of a multiple choice or cloze. in_group: whether it is a part of another result.
    log_likelihoods: of the requests of each document, in nats.
    """

    num_documents: int
    num_truncated: int
    num_close: int
    numbers: dict[str, float]
    in_group: bool = False
    log_likelihoods: tuple[tuple[float, ...], ...] = field(default=(), repr=False)

    def names(self) -> list[str]:
        """Of the scores, without their errors."""
        return [name for name in self.numbers if not name.endswith("_stderr")]

    def describe(self) -> str:
        """All numbers, accuracies in percent, with their errors: "acc 41.2% ± 1.4%"."""
        parts = []
        for name in self.names():
            form = ".1%" if name.startswith(("acc", "exact_match")) else ".4g"
            error = self.numbers.get(f"{name}_stderr")
            parts.append(f"{name} {self.numbers[name]:{form}}" + (f" ± {error:{form}}" if error is not None else ""))
        return ", ".join(parts) + (f" ({self.num_close} close)" if self.num_close else "")
