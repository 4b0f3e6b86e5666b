"""Which token comes next: the most likely one, or one that is drawn."""

from dataclasses import dataclass

import torch
from torch import Tensor

from titanlite.models.randomness import row_keys, uniform


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen of a row of logits; what is left out of the draw, in this order.

    temperature: logits are divided by it; 0: the most likely token is taken, of equal ones the first, nothing is drawn.
    top_k: so many most likely tokens stay, and those that are equal to the last of them; None: all.
    top_p: of these the fewest whose probabilities add up to top_p, of equal ones the first; 1: all.
    seed: of the draws; what a row draws depends on the seed, its index and how many tokens it has drawn, nothing else.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """What is drawn from: (rows, vocab_size) in promote_types(dtype, float32), 0 for what is left out.

    logits: (rows, vocab_size). The temperature is above 0.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # A temperature below `tiny` might be rounded to 0. The highest score becomes 0, so that none overflows upwards.
    temperature = max(sampling.temperature, torch.finfo(scores.dtype).tiny)
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature
    if sampling.top_k is not None:
        last_kept = scores.topk(min(sampling.top_k, scores.shape[-1])).values[:, -1:]
        scores = scores.masked_fill(scores < last_kept, -torch.inf)
    if sampling.top_p < 1:
        falling, tokens = scores.sort(dim=-1, descending=True, stable=True)
        is_tail = torch.zeros_like(falling, dtype=torch.bool)
        is_tail[:, 1:] = falling.softmax(-1).cumsum(-1)[:, :-1] >= sampling.top_p
        scores = scores.masked_fill(torch.empty_like(is_tail).scatter_(-1, tokens, is_tail), -torch.inf)
    return scores.softmax(-1)


def choose(logits: Tensor, sampling: Sampling, step: int) -> Tensor:
    """A token for each row, int64 (rows,). logits: (rows, vocab_size); step: how many were chosen before."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    cumulative = probabilities(logits, sampling).double().cumsum(-1)
    keys = row_keys(sampling.seed, step, torch.arange(len(logits), device=logits.device))
    high, low = uniform(keys, "next token", 2, dtype=torch.float64).unbind(1)  # 24 bits each
    drawn = (high + low * 2.0**-24).unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, drawn, right=True).squeeze(1)
