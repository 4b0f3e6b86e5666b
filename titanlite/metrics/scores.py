"""Scores of data sets and tasks: losses, and accuracies and likelihoods by the definitions of lm_eval."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np


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
    """The result of one task. num_truncated: of its rows (a row is a context with one choice).

    numbers: acc, the share of right answers; acc_norm of a multiple choice, perplexity of a cloze; each with its
    standard error NAME_stderr if there are two questions or more.
    log_likelihoods: of each choice of each question, in nats; a cloze has one choice. is_greedy: of the questions of a
    cloze, whether each token of the answer is the most likely one; else empty.
    """

    num_questions: int
    num_truncated: int
    numbers: dict[str, float]
    log_likelihoods: tuple[tuple[float, ...], ...] = field(repr=False)
    is_greedy: tuple[bool, ...] = field(default=(), repr=False)

    def names(self) -> list[str]:
        """Of the scores, without their errors."""
        return [name for name in self.numbers if not name.endswith("_stderr")]

    def describe(self) -> str:
        """acc and the other number, in percent except for perplexities, with their errors: "acc 41.2% ± 1.4%"."""
        parts = []
        for name in self.names():
            form = ".4g" if name == "perplexity" else ".1%"
            error = self.numbers.get(f"{name}_stderr")
            parts.append(f"{name} {self.numbers[name]:{form}}" + (f" ± {error:{form}}" if error is not None else ""))
        return ", ".join(parts)


def score_choices(
    log_likelihoods: Sequence[Sequence[float]],
    choices: Sequence[Sequence[str]],
    answers: Sequence[int],
    num_truncated: int = 0,
) -> TaskScores:
    """Scores of a multiple choice. Of equally likely choices, the first one is chosen.

    acc: the choice with the largest log-likelihood. acc_norm: with the largest log-likelihood per character.
    """
    right, right_norm = [], []
    for sums, texts, answer in zip(log_likelihoods, choices, answers, strict=True):
        per_character = np.array(sums) / np.array([len(text) for text in texts])
        right.append(float(np.argmax(sums) == answer))
        right_norm.append(float(np.argmax(per_character) == answer))
    numbers = {**_mean("acc", right), **_mean("acc_norm", right_norm)}
    return TaskScores(len(answers), num_truncated, numbers, tuple(map(tuple, log_likelihoods)))


def score_cloze(log_likelihoods: Sequence[float], is_greedy: Sequence[bool], num_truncated: int = 0) -> TaskScores:
    """Scores of a cloze. acc: the share of greedy answers. perplexity: of an answer, the exponential of minus the mean
    log-likelihood; its error is that of the mean, to first order."""
    numbers = _mean("acc", [float(each) for each in is_greedy])
    mean = _mean("mean", log_likelihoods)
    perplexity = math.inf if mean["mean"] < -700 else math.exp(-mean["mean"])  # exp would overflow
    numbers["perplexity"] = perplexity
    if "mean_stderr" in mean:
        numbers["perplexity_stderr"] = perplexity * mean["mean_stderr"]
    return TaskScores(
        len(is_greedy), num_truncated, numbers, tuple((each,) for each in log_likelihoods), tuple(is_greedy)
    )


def _mean(name: str, values: Sequence[float]) -> dict[str, float]:
    """The mean, and its standard error from the sample's standard deviation; without it for a single value."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return {name: mean}
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return {name: mean, f"{name}_stderr": math.sqrt(variance / count)}
