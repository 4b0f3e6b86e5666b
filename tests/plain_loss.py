"""The loss in plain torch, from the logits of all tokens."""

import torch
from torch import Tensor
from torch.nn import functional

from titanlite.batch import IGNORE_INDEX


def cross_entropy_by_row(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropy of each row, in nats, over all positions whose label is not IGNORE_INDEX; not averaged.

    logits: (batch, seq_len, vocab_size). labels: int64 (batch, seq_len). Returns (batch,).
    """
    scores = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    losses = functional.cross_entropy(scores, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    return losses.view(labels.shape).sum(1)
