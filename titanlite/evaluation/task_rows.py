"""Rows of a task in batches, longest first, shared by the data ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titanlite.batch import FILLER, IGNORE_INDEX, Batch
from titanlite.data.tasks import Scored
from titanlite.parallel.mesh import Mesh

LEAST_LENGTH = 32
"""Shortest length to which rows are padded."""


@dataclass(frozen=True)
class RowShape:
    """Sizes of a data rank's batches: `rows` rows of `seq_len` positions.

    is_fixed: whether all rows have this length. Otherwise, batches of short rows have shorter and more rows.
    """

    rows: int
    seq_len: int
    is_fixed: bool

    def fitting(self, inputs: int, divisor: int) -> tuple[int, int]:
        """(rows, length) of a batch whose longest row has this many inputs: half of seq_len as often as it fits.

        divisor: of the length.
        """
        length = self.seq_len
        while not self.is_fixed and length % (2 * divisor) == 0 and length // 2 >= max(inputs, LEAST_LENGTH):
            length //= 2
        return self.rows * (self.seq_len // length), length


def task_batches(rows: Sequence[Scored], shape: RowShape, mesh: Mesh) -> Iterator[tuple[Tensor, Batch, int]]:
    """(numbers of this rank's rows, the rows, number of rows on all ranks) of each batch, the longest rows first.

    All ranks have the same number of batches of the same shape: filler follows this rank's rows.
    """
    order = sorted(range(len(rows)), key=lambda index: (-len(rows[index].tokens), index))
    while order:
        per_rank, length = shape.fitting(len(rows[order[0]].tokens) - 1, mesh.degrees["tp"])
        batch, order = order[: per_rank * mesh.data_degree], order[per_rank * mesh.data_degree :]
        own = batch[mesh.data_rank :: mesh.data_degree]
        yield (
            torch.tensor(own, dtype=torch.int64),
            _padded([rows[index] for index in own], per_rank, length),
            len(batch),
        )


def _padded(rows: Sequence[Scored], per_rank: int, length: int) -> Batch:
    """A batch of `per_rank` rows, the last ones filler. Labels are the tokens to be scored."""
    tokens = torch.zeros(per_rank, length, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORE_INDEX)
    lengths, numbers = torch.zeros(per_rank, dtype=torch.int64), torch.full((per_rank,), FILLER)
    for number, row in enumerate(rows):
        inputs = len(row.tokens) - 1
        ids = torch.from_numpy(row.tokens)
        tokens[number, :inputs] = ids[:-1]
        labels[number, row.begin - 1 : inputs] = ids[row.begin :]
        lengths[number], numbers[number] = inputs, number
    return Batch(tokens, labels, numbers, torch.zeros_like(numbers), lengths=lengths)
