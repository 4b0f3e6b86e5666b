"""The input and the result of one training step.

Does not import torch, so that the worker processes that tokenize and pack start faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position that does not count in the loss."""

FILLER = -1
"""Number of a filler row, which completes the rows of a data rank and counts nowhere."""

NUM_TOTALS = 3
"""Totals of a step by source: the summed loss, valid tokens, and sequences with a valid token."""


class Batch(NamedTuple):
    """One microbatch of one data rank: tokens and labels, int64 (local_batch_size, seq_len), on the CPU.

    labels: the next token at each position, or IGNORE_INDEX. sequences: int64 (local_batch_size,), the number of each
    row in the run, from 0, the same on every mesh, or FILLER; always on the CPU, since the host reads it. sources:
    int64 (local_batch_size,), index of each row's source in [[data.sources]]. positions: with data.document_mask, int64
    (local_batch_size, seq_len), 0 at the start of a row and of each document in it; else None. lengths: int64
    (local_batch_size,), positions of each row that hold a token of a document, the first ones; the others are padding.
    Always on the CPU. None: all do.
    """

    tokens: Tensor
    labels: Tensor
    sequences: Tensor
    sources: Tensor
    positions: Tensor | None = None
    lengths: Tensor | None = None


def count_sequences(batches: Sequence[Batch]) -> int:
    """The rows that are sequences of the run: all but filler, which comes last."""
    return sum(int((batch.sequences.numpy() != FILLER).sum()) for batch in batches)


def rows_and_tokens(batches: Sequence[Batch]) -> tuple[int, int]:
    """The rows that hold a token of a document, and the positions that do."""
    rows = tokens = 0
    for batch in batches:
        rows += len(batch.tokens) if batch.lengths is None else int((batch.lengths > 0).sum())
        tokens += batch.tokens.numel() if batch.lengths is None else int(batch.lengths.sum())
    return rows, tokens


@dataclass(frozen=True)
class StepStats:
    """The result of one optimizer step: scalar tensors on the device, not yet read by the host.

    mean_loss: this rank's share of the step's mean loss; the sum over all ranks is the mean. 0 on ranks whose loss
        another rank counts, and on ranks that compute no loss.
    loss_sum: this rank's share of the step's summed loss, float64; 0 where mean_loss is.
    grad_norm: global norm before clipping, the same on all ranks.
    num_valid: valid tokens of the global batch, the same on all ranks, int64.
    skipped: 1 if the update was skipped, else 0 (integer or bool); the same on all ranks.
    by_source: this rank's share of the step's totals by source (NUM_TOTALS, sources), see totals_by_source.
    row_losses: this rank's share of the mean loss by sequence, (sequences of the step on this data rank,), in the order
        of the loader's; 0 except on the last stage of a pipeline.
    shard_norms: norm of this rank's shard of each gradient, float64 (parameters,), see GradNorm.
    spike_ratio: global norm relative to the median of recent steps, see SpikeGate; 0 if spikes are disabled.
    max_score: the largest attention score of this rank's heads, of the rows of all data ranks; None without
        optimizer.qk_clip.
    terms: the parts of this rank's share of each term of the loss, see parts_of, in their order; empty on ranks that
        compute no loss.
    """

    mean_loss: Tensor
    loss_sum: Tensor
    grad_norm: Tensor
    num_valid: Tensor
    skipped: Tensor
    by_source: Tensor
    row_losses: Tensor
    shard_norms: Tensor
    spike_ratio: Tensor
    max_score: Tensor | None = None
    terms: Sequence[Tensor] = ()
