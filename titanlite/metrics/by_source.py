"""Totals of a step by data source: sums and counts, not means."""

import torch
from torch import Tensor

from titanlite.batch import IGNORE_INDEX

NUM_TOTALS = 3
"""Per source: the summed loss, valid tokens, and sequences with a valid token."""


def totals_by_source(loss_sums: Tensor, labels: Tensor, sources: Tensor, num_sources: int) -> Tensor:
    """Totals of these rows: float64 (NUM_TOTALS, num_sources), in which counts are exact up to 2^53.

    loss_sums: (rows,). labels: int64 (rows, seq_len). sources: int64 (rows,), from 0. All on one device; no host read.
    A loss that is not finite affects the totals of its own source only.
    """
    num_valid = (labels != IGNORE_INDEX).sum(1)
    values = torch.stack([value.to(torch.float64) for value in (loss_sums, num_valid, num_valid > 0)])
    is_of = sources == torch.arange(num_sources, device=sources.device)[:, None]
    return torch.where(is_of, values[:, None], 0.0).sum(-1)
