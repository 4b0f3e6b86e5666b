"""Choose the next token: greedy, or drawn at random."""

from dataclasses import dataclass

import torch
from torch import Tensor

from titanlite.models.randomness import row_keys, uniform


@dataclass(frozen=True)
class Sampling:
    """How to choose a token from a row of logits. The settings apply in this order.

    temperature: divides the logits; 0: greedy, i.e. the most likely token, the first of equal ones.
    top_k: keep the k most likely tokens, and all that tie with the last of them; None: keep all.
    top_p: of these, keep the fewest whose probabilities add up to top_p, the first of equal ones; 1: keep all.
    seed: of the draws. A draw depends only on the seed, the row's index and the number of tokens drawn before.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution to draw from: (rows, vocab_size) in promote_types(dtype, float32); 0 for excluded tokens.

    logits: (rows, vocab_size). The temperature must be above 0.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # A temperature below `tiny` might round to 0. The largest score becomes 0, so that no score overflows.
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
    """Choose a token per row: int64 (rows,). logits: (rows, vocab_size). step: number of tokens chosen before."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    cumulative = probabilities(logits, sampling).double().cumsum(-1)
    keys = row_keys(sampling.seed, step, torch.arange(len(logits), device=logits.device))
    high, low = uniform(keys, "next token", 2, dtype=torch.float64).unbind(1)  # 24 bits each
    drawn = (high + low * 2.0**-24).unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, drawn, right=True).squeeze(1)
