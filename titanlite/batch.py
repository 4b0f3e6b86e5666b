"""The input and the result of one training step.

Imports no torch, which the processes that tokenize and pack do without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position that takes no part in the loss."""


class Batch(NamedTuple):
    """One microbatch of one data rank: tokens and labels, int64 (local_batch_size, seq_len), on the CPU.

    labels: the next token at each position, IGNORE_INDEX where there is none. sequences: int64 (local_batch_size,), the
    number of each row in the run, from 0, the same on every mesh; always on the CPU, since the host asks for it.
    sources: int64 (local_batch_size,), which of [[data.sources]] each row comes from. positions: with
    data.document_mask, int64 (local_batch_size, seq_len), 0 where a row and where a document in it begins; else None.
    """

    tokens: Tensor
    labels: Tensor
    sequences: Tensor
    sources: Tensor
    positions: Tensor | None = None


@dataclass(frozen=True)
class StepStats:
    """The result of one optimizer step: scalar tensors on the device, not yet read by the host.

    mean_loss: this rank's share of the step's mean loss; the sum over all ranks is the mean. A rank without a share of
        its own (it repeats another's, or computes no loss) has 0.
    grad_norm: global norm before clipping, the same on all ranks.
    num_valid: valid tokens of the global batch, the same on all ranks, int64.
    skipped: 1 where the update was withheld, else 0 (integer or bool); the same on all ranks.
    by_source: this rank's share of the step's totals by source (NUM_TOTALS, sources), as of totals_by_source.
    """

    mean_loss: Tensor
    grad_norm: Tensor
    num_valid: Tensor
    skipped: Tensor
    by_source: Tensor
