"""The training loss: a sum over valid tokens. Its one division happens where the whole global batch is known."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

IGNORE_INDEX = -100
"""Label of a position that takes no part in the loss."""


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropy over all positions whose label is not IGNORE_INDEX, in nats; nothing is averaged.

    logits: (batch, seq_len, vocab_size), any floating dtype. labels: int64 (batch, seq_len), each in
    [0, vocab_size) or IGNORE_INDEX. Returns a scalar in promote_types(logits.dtype, float32). Where no label is valid
    it is 0 and still has a graph, so that backward runs, with gradients of zero. Logits that are cut along the
    vocabulary (a DTensor, inside `parallel_loss`) give the same sum on each of their ranks.
    """
    # The cast is no copy for float32 and float64; for smaller dtypes the copy dies as soon as log_softmax has read it.
    scores = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    loss_sum = functional.cross_entropy(scores, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return loss_sum.to_local() if isinstance(loss_sum, DTensor) else loss_sum


def mean_loss_share(logits: Tensor, labels: Tensor, num_valid: Tensor) -> Tensor:
    """What these positions add to the mean loss of the step: the only division there is.

    logits, labels: as in cross_entropy_sum. num_valid: int64 scalar, the valid tokens of the whole global batch, over
    all microbatches and data ranks. The shares of all of them add up to the mean loss.
    """
    return cross_entropy_sum(logits, labels) / num_valid.clamp(min=1)
