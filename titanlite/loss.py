"""The training loss: a sum over valid tokens. Its one division happens where the whole global batch is known."""

import torch
from torch import Tensor
from torch.nn import functional

IGNORE_INDEX = -100
"""Label of a position that takes no part in the loss."""


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropy over all positions whose label is not IGNORE_INDEX, in nats; nothing is averaged.

    logits: (batch, seq_len, vocab_size), any floating dtype. labels: int64 (batch, seq_len), each in
    [0, vocab_size) or IGNORE_INDEX. Returns a scalar in promote_types(logits.dtype, float32). Where no label is valid
    it is 0 and still has a graph, so that backward runs, with gradients of zero.
    """
    # The cast is no copy for float32 and float64; for smaller dtypes the copy dies as soon as log_softmax has read it.
    scores = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(scores, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
