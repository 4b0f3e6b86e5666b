"""The loss in plain torch, from the logits of all tokens."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from titanlite.batch import IGNORE_INDEX, Batch
from titanlite.models.family import LanguageModel
from titanlite.models.losses import CROSS_ENTROPY, Loss


def cross_entropy_by_row(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropy of each row, in nats, over all positions whose label is not IGNORE_INDEX; not averaged.

    logits: (batch, seq_len, vocab_size). labels: int64 (batch, seq_len). Returns (batch,).
    """
    scores = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    losses = functional.cross_entropy(scores, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    return losses.view(labels.shape).sum(1)


def further_labels(batch: Batch) -> Tensor:
    """The label of the next position of the same document, (rows, seq_len), document by document."""
    found = torch.full_like(batch.labels, IGNORE_INDEX)
    for row, labels in enumerate(batch.labels):
        starts = [0] if batch.positions is None else (batch.positions[row] == 0).nonzero().flatten().tolist()
        for start, end in pairwise([*starts, len(labels)]):
            found[row, start : end - 1] = labels[start + 1 : end]
    return found


def further_term(
    model: LanguageModel, batch: Batch, weight: float, loss: Loss = CROSS_ENTROPY, /, **keys: Any
) -> tuple[Tensor, Tensor]:
    """The logits of a plain model, and the term of further tokens; 0 of a model that does not predict them."""
    if not model.predicts_further:
        return model(batch.tokens, **keys), torch.zeros(())
    following = torch.cat((batch.tokens[:, 1:], batch.tokens[:, :1]), dim=1)
    logits, further = model(batch.tokens, next_tokens=following, **keys).chunk(2)
    valid = (labels := further_labels(batch)) != IGNORE_INDEX
    losses = loss.function(further[valid], labels[valid])
    return logits, weight * losses.sum() / max(len(losses), 1)
