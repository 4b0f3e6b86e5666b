"""Training loss: a sum over valid tokens, divided once, by the number of valid tokens of the global batch."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from titanlite.batch import IGNORE_INDEX


def cross_entropy_by_row(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropy of each row, in nats, over all positions whose label is not IGNORE_INDEX; not averaged.

    logits: (batch, seq_len, vocab_size), any floating dtype. labels: int64 (batch, seq_len), each in
    [0, vocab_size) or IGNORE_INDEX. Returns (batch,) in promote_types(logits.dtype, float32). A row without a valid
    label has a sum of 0 with a graph, so that backward runs, with gradients of zero. Logits sharded along the
    vocabulary (a DTensor, inside `parallel_loss`) give the same sums on each rank of the tp group.
    """
    # The cast copies only dtypes below float32; log_softmax reads the copy, which is freed right after it.
    scores = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    losses = functional.cross_entropy(scores, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    losses = losses.to_local() if isinstance(losses, DTensor) else losses
    return losses.view(labels.shape).sum(1)


def mean_loss_shares(logits: Tensor, labels: Tensor, num_valid: Tensor) -> Tensor:
    """Share of each row in the mean loss of the step, (batch,). The only division in the computation of the loss.

    logits, labels: see cross_entropy_by_row. num_valid: int64 scalar, the valid tokens of the global batch, over all
    microbatches and data ranks. The shares of all their rows add up to the mean loss.
    """
    return cross_entropy_by_row(logits, labels) / num_valid.clamp(min=1)
