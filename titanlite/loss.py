"""The training loss: a sum over valid tokens. Its one division happens where the whole global batch is known."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from titanlite.batch import IGNORE_INDEX


def cross_entropy_by_row(logits: Tensor, labels: Tensor) -> Tensor:
    """Per row, the sum of the cross-entropy over all positions whose label is not IGNORE_INDEX, in nats; no average.

    logits: (batch, seq_len, vocab_size), any floating dtype. labels: int64 (batch, seq_len), each in
    [0, vocab_size) or IGNORE_INDEX. Returns (batch,) in promote_types(logits.dtype, float32). Where a row has no valid
    label it is 0 and still has a graph, so that backward runs, with gradients of zero. Logits that are cut along the
    vocabulary (a DTensor, inside `parallel_loss`) give the same sums on each of their ranks.
    """
    # The cast is no copy for float32 and float64; for smaller dtypes the copy dies as soon as log_softmax has read it.
    scores = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    losses = functional.cross_entropy(scores, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    losses = losses.to_local() if isinstance(losses, DTensor) else losses
    return losses.view(labels.shape).sum(1)


def mean_loss_shares(logits: Tensor, labels: Tensor, num_valid: Tensor) -> Tensor:
    """What each row adds to the mean loss of the step, (batch,): the only division there is.

    logits, labels: as in cross_entropy_by_row. num_valid: int64 scalar, the valid tokens of the whole global batch,
    over all microbatches and data ranks. The shares of all their rows add up to the mean loss.
    """
    return cross_entropy_by_row(logits, labels) / num_valid.clamp(min=1)
