"""Evaluation on tasks: the likelihood of each choice of each question, independent of the mesh."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.batch import FILLER, IGNORE_INDEX, Batch
from titanlite.data.tasks import EncodedTask, Scored
from titanlite.forward import ModelOnMesh, cross_entropy_in, forward_only, on_device
from titanlite.metrics.tasks import TaskScores, score_choices, score_cloze
from titanlite.runtime.logging import log
from titanlite.runtime.signals import StoppedError, StopRequest

PROGRESS_EVERY_S = 30.0
"""Seconds between log lines during a task."""
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


@dataclass(frozen=True)
class TaskEvaluator:
    """Scores a model on tasks. Its methods are collectives; data ranks share the rows of a task.

    group: gloo group of all ranks, to agree whether to stop, before each batch. stop: this rank's stop request.
    """

    model: ModelOnMesh
    group: dist.ProcessGroup
    shape: RowShape
    stop: StopRequest

    def scores(self, encoded: EncodedTask, clock: Callable[[], float] = perf_counter) -> TaskScores:
        """Compute the scores of a task, by the cross-entropy whatever the loss of training is; the same on all ranks.

        Weights, gradients and random state do not change. One host read, at the end, except for the answers of a cloze.
        Raises StoppedError on all ranks if a rank has a stop request.
        """
        model, task, rows = self.model, encoded.task, encoded.rows
        is_cloze = task.format == "cloze"
        # Loss and misses of each row. One rank adds each of them to zeros, so that their sum is exact.
        found = torch.zeros(len(rows), 2, dtype=torch.float64, device=model.device)
        start = last = clock()
        with forward_only(model), cross_entropy_in(model):
            done = 0
            for own, batch, size in self._batches(rows):
                self._require_no_stop()
                batch = on_device(batch, model.device)
                losses, misses = model.row_misses(batch) if is_cloze else (model.row_losses(batch), torch.zeros(()))
                if model.counts_loss:
                    both = torch.stack([losses, misses.to(losses).expand_as(losses)], dim=1)[: len(own)]
                    found[own] = both.to(found.dtype)
                done += size
                if (now := clock()) - last >= PROGRESS_EVERY_S:
                    last = now
                    log.info(
                        "task %s: %s of %s rows, after %.0f s", task.name, f"{done:,}", f"{len(rows):,}", now - start
                    )
        dist.all_reduce(found)
        losses, misses = found.T.tolist()
        questions, sums = task.questions, iter(-loss for loss in losses)
        if is_cloze:
            return score_cloze(list(sums), [count == 0 for count in misses], encoded.truncated)
        grouped = [[next(sums) for _ in question.choices] for question in questions]
        choices = [question.choices for question in questions]
        return score_choices(grouped, choices, [question.answer for question in questions], encoded.truncated)

    def _batches(self, rows: Sequence[Scored]) -> Iterator[tuple[Tensor, Batch, int]]:
        """(numbers of this rank's rows, the rows, number of rows on all ranks) of each batch, the longest rows first.

        All ranks have the same number of batches of the same shape: filler follows this rank's rows.
        """
        mesh = self.model.mesh
        order = sorted(range(len(rows)), key=lambda index: (-len(rows[index].tokens), index))
        while order:
            per_rank, length = self.shape.fitting(len(rows[order[0]].tokens) - 1, mesh.degrees["tp"])
            batch, order = order[: per_rank * mesh.data_degree], order[per_rank * mesh.data_degree :]
            own = batch[mesh.data_rank :: mesh.data_degree]
            yield (
                torch.tensor(own, dtype=torch.int64),
                _padded([rows[index] for index in own], per_rank, length),
                len(batch),
            )

    def _require_no_stop(self) -> None:
        """A CPU all-reduce."""
        number = torch.tensor(self.stop.number, dtype=torch.int64)
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self.group)
        if stop := int(number):
            raise StoppedError(stop)


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
