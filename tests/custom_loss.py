"""A registered loss with terms, and its objective in plain torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from titanlite.models.losses import LOSSES, Loss, Term, cross_entropy


def _smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with label smoothing; NaN for tokens that are not valid."""
    log_probabilities = logits.log_softmax(1)
    own = log_probabilities.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    return (-0.9 * own - 0.1 * log_probabilities.mean(1)) * torch.where(labels < 0, torch.nan, 1.0)


def _z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    del labels
    return 0.3 * logits.logsumexp(1).square()


def _top(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.where(labels % 3 == 0, logits.square().mean(1), 0)


LOSS = Loss(
    "smoothed",
    _smoothed,
    {"z_loss": Term(_z_loss, torch.ones_like), "thirds": Term(_top, lambda labels: labels % 3 == 0)},
)


WITH_Z = Loss(
    "cross_entropy",
    cross_entropy,
    {"z_loss": Term(lambda logsumexp, labels: 0.3 * logsumexp.square() + labels, of="logsumexp")},
)
"""The cross-entropy with a term that needs no logits of the full vocabulary on a rank."""


@contextmanager
def registered() -> Iterator[None]:
    """Inside, the loss can be chosen as loss.name."""
    with patch.dict(LOSSES, {LOSS.name: LOSS}):
        yield


def plain_objective(logits: Tensor, labels: Tensor, loss: Loss = LOSS) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The objective, its mean loss and its terms, of all tokens at once. logits: (tokens, vocab_size)."""
    logits, labels = logits[labels >= 0], labels[labels >= 0]
    mean = loss.function(logits, labels).sum() / max(len(labels), 1)
    terms = []
    for term in loss.terms.values():
        values = term.values(logits if term.of == "logits" else logits.logsumexp(1), labels)
        terms.append(values.sum() / term.count(labels).sum().clamp(min=1))
    return mean + sum(terms), mean, terms
