"""A loss of one's own: cross-entropy with label smoothing, and a z-loss as a term of the objective.

    [job]
    plugins = ["loss.py"]

    [loss]
    name = "smoothed"

The z-loss (Chowdhery et al., "PaLM", 2022, section 5) keeps the logarithm of the sum of the exponentials near 0.
"""

import torch
from torch import Tensor

import titanlite
from titanlite.models.losses import Term

SMOOTHING = 0.1
Z_LOSS = 1e-4


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each token, (tokens,). logits: (tokens, vocab_size). labels: negative for tokens that do not count,
    whose values are ignored."""
    own = logits.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    return logits.logsumexp(1) - (1 - SMOOTHING) * own - SMOOTHING * logits.mean(1)


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    del labels
    return Z_LOSS * logits.logsumexp(dim=1).square()


def each_token(labels: Tensor) -> Tensor:
    """The z-loss is a mean over all tokens that count."""
    return torch.ones_like(labels)


titanlite.register_loss("smoothed", smoothed, terms={"z_loss": Term(z_loss, each_token)})
