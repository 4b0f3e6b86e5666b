"""Evaluation of a model, independent of the mesh: its loss over data sets, each token once, and its scores on tasks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.batch import FILLER, IGNORE_INDEX, Batch
from titanlite.data.loader import Loader
from titanlite.evaluation.harness import Generate, Harness, Row
from titanlite.forward import ModelOnMesh, cross_entropy_in, forward_only, on_device
from titanlite.metrics.scores import SetTotals, TaskScores
from titanlite.parallel.exact import loss_grid, on_grid
from titanlite.parallel.mesh import Mesh
from titanlite.ranks.agreement import RanksError, run_together
from titanlite.ranks.signals import StoppedError, StopRequest
from titanlite.runtime.errors import DataError, UserError
from titanlite.runtime.logging import Progress
from titanlite.runtime.text import counted

LEAST_LENGTH = 32
"""Shortest length to which rows are padded."""
MOST_TOKENS = 2**26
"""Of a data set whose loss has the same bits on all meshes."""


@dataclass(frozen=True)
class Tasks:
    """The tasks of a run. harness: on rank 0, else None. rows: its rows, on all ranks."""

    harness: Harness | None
    rows: Sequence[Row]


def share_tasks(harness: Harness | None, group: dist.ProcessGroup) -> Tasks:
    """The tasks on all ranks of a gloo group. harness: on rank 0. A collective."""
    rows = [harness.rows if harness is not None else None]
    dist.broadcast_object_list(rows, src=0, group=group)
    assert rows[0] is not None
    return Tasks(harness, rows[0])


@dataclass(frozen=True)
class RowShape:
    """Sizes of a data rank's batches: `rows` rows of `seq_len` positions.

    is_fixed: whether all rows have this length. Otherwise, batches of short rows have shorter and more rows.
    """

    rows: int
    seq_len: int
    is_fixed: bool

    def length(self, inputs: int, divisor: int) -> int:
        """The length to which a row with this many inputs is padded: half of seq_len as often as it fits.

        divisor: of the length.
        """
        length = self.seq_len
        while not self.is_fixed and length % (2 * divisor) == 0 and length // 2 >= max(inputs, LEAST_LENGTH):
            length //= 2
        return length


def row_batches(rows: Sequence[Row], shape: RowShape, mesh: Mesh) -> Iterator[tuple[Tensor, Batch, int]]:
    """(numbers of this rank's rows, the rows, number of rows on all ranks) of each batch, the longest rows first.

    All ranks have the same number of batches of the same shape: filler follows this rank's rows. A row is padded to a
    length that does not depend on the other rows, nor on the number of data ranks.
    """
    lengths = [shape.length(len(row.tokens) - 1, mesh.degrees["tp"]) for row in rows]
    order = sorted(range(len(rows)), key=lambda index: (-lengths[index], index))
    while order:
        length = lengths[order[0]]
        per_rank = shape.rows * (shape.seq_len // length)
        batch = [index for index in order[: per_rank * mesh.data_degree] if lengths[index] == length]
        order = order[len(batch) :]
        own = batch[mesh.data_rank :: mesh.data_degree]
        yield (
            torch.tensor(own, dtype=torch.int64),
            _padded([rows[index] for index in own], per_rank, length),
            len(batch),
        )


def _padded(rows: Sequence[Row], per_rank: int, length: int) -> Batch:
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


@dataclass(frozen=True)
class Evaluator:
    """Computes losses and scores of a model. Its methods are collectives; weights, gradients and random state stay.

    group: gloo group of all ranks, to agree before each step. stop: this rank's stop request; if a rank has one, the
    methods raise StoppedError on all ranks. shape: of the rows of tasks. token_bytes: int64 (vocab_size,), number of
    text bytes of each token, on the device; None if unknown, why_no_bytes says why. in_nats: whether the model's loss
    is the cross-entropy in nats. bit_equal: whether the losses must not depend on the order of the rows.
    """

    model: ModelOnMesh
    group: dist.ProcessGroup
    stop: StopRequest
    shape: RowShape
    token_bytes: Tensor | None = None
    why_no_bytes: str = ""
    in_nats: bool = True
    bit_equal: bool = False

    def totals(
        self, loader: Loader, *, steps: int, after_batch: Callable[[int], None] = lambda _: None
    ) -> tuple[SetTotals, int]:
        """(totals over the loader's data, number of rows skipped as bad).

        steps: maximum number of steps of the loader; -1: all. after_batch: called with the number of each step, from 1.
        The loader must be at its beginning, and is reset to it afterwards, so that the position in the training data
        does not change. One host read, at the end. Raises RanksError if the data of a rank is invalid.
        """
        model = self.model
        # loss_sum, num_valid, num_bytes, bad_rows, too_long; the counts are exact up to 2^53.
        totals = torch.zeros(5, dtype=torch.float64, device=model.device)
        try:
            with forward_only(model):
                for number, batches in enumerate(self._batches(loader, steps), start=1):
                    for batch in batches:
                        totals[:3] += self._totals_of(on_device(batch, model.device))
                    after_batch(number)
            totals[:3] *= model.counts_loss
            too_long = loader.too_long_by_name(counts=model.counts_rows)
            totals[3] += loader.bad_rows * model.counts_rows
            totals[4] += sum(too_long.values())
        finally:
            loader.restart()
        dist.all_reduce(totals)
        loss_sum, *counts = totals.tolist()
        num_valid, num_bytes, bad_rows, num_too_long = (int(count) for count in counts)
        known_bytes = None if self.token_bytes is None else num_bytes
        return SetTotals(loss_sum, num_valid, known_bytes, self.in_nats, num_too_long if too_long else None), bad_rows

    def totals_by_name(
        self, loaders: Mapping[str, Loader], *, steps: int, max_bad_rows: int
    ) -> Iterator[tuple[str, SetTotals]]:
        """(name, totals) of one loader after the other; steps: see `totals`.

        After the last loader, raises RanksError as `require_usable` does.
        """
        bad_rows, too_long, num_valid, progress = 0, 0, 0, Progress()
        limit = "" if steps < 0 else f" of at most {steps:,}"
        for number, (name, loader) in enumerate(loaders.items(), start=1):
            source = f"validation: source {number} of {len(loaders)}, {name}"

            def note(batch: int, source: str = source) -> None:
                progress.note(f"{source}: batch {batch:,}{limit}")

            totals, bad = self.totals(loader, steps=steps, after_batch=note)
            bad_rows += bad
            too_long += totals.too_long or 0
            num_valid += totals.num_valid
            yield name, totals
        if loaders:
            require_usable(num_valid, bad_rows, too_long, max_bad_rows)

    def check_data(self, loaders: Mapping[str, Loader], *, steps: int, max_bad_rows: int) -> None:
        """Read what a validation will read, without the model. Raises RanksError for what would end the validation."""
        counts, progress = torch.zeros(3, dtype=torch.int64), Progress()  # targets, bad rows, conversations too long
        for name, loader in loaders.items():
            try:
                for number, batches in enumerate(self._batches(loader, steps), start=1):
                    counts[0] += sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in batches)
                    progress.note(f"reading the validation data {name}: batch {number:,}")
                counts[1] += loader.bad_rows
                counts[2] += sum(loader.too_long_by_name(counts=True).values())
            finally:
                loader.restart()
        counts *= self.model.counts_rows
        dist.all_reduce(counts, group=self.group)
        if loaders:
            num_valid, bad_rows, too_long = counts.tolist()
            require_usable(num_valid, bad_rows, too_long, max_bad_rows)

    def scores(self, tasks: Tasks, generate: Generate | None = None) -> dict[str, TaskScores]:
        """Compute the scores of all tasks, by the cross-entropy whatever the loss of training is, on all ranks.

        The data ranks share the rows. generate: see Harness.scores.
        """
        model, rows = self.model, tasks.rows
        # Loss and misses of each row. One rank adds each of them to zeros, so that their sum is exact.
        found = torch.zeros(len(rows), 2, dtype=torch.float64, device=model.device)
        done, progress = 0, Progress()
        with forward_only(model), cross_entropy_in(model):
            for own, batch, size in row_batches(rows, self.shape, model.mesh):
                self._any_has_data(True)
                losses, misses = model.row_misses(on_device(batch, model.device))
                if model.counts_loss:
                    found[own] = torch.stack([losses, misses], dim=1)[: len(own)].to(found.dtype)
                done += size
                progress.note(f"tasks: {done:,} of {len(rows):,} rows")
        dist.all_reduce(found)
        losses, misses = found.T.tolist()
        scores: list[Any] = [None]

        def score() -> None:
            if tasks.harness is not None:
                scores[0] = tasks.harness.scores(losses, misses, generate)

        run_together(score, self.group)
        dist.broadcast_object_list(scores, src=0, group=self.group)
        result: dict[str, TaskScores] = scores[0]
        return result

    def _batches(self, loader: Loader, steps: int) -> Iterator[Sequence[Batch]]:
        """Batches of each step of the loader, until the loaders of all ranks are exhausted. Raises RanksError."""
        done = 0
        while done != steps:
            batches, error, has_data = list[Batch](), None, not all(loader.ended)
            try:
                batches = loader.next_step()
            except UserError as raised:
                error = raised
            if not self._any_has_data(has_data, error):
                return
            yield batches
            done += 1

    def _any_has_data(self, has_data: bool, error: UserError | None = None) -> bool:
        """Whether any rank has data left. A CPU all-reduce. Raises StoppedError if a rank has a stop request, and the
        error of the lowest sequence, as RanksError, if ranks have one."""
        flags = torch.tensor([has_data, self.stop.number, error is not None], dtype=torch.int64)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        any_has_data, stop, any_error = flags.tolist()
        if stop:
            raise StoppedError(stop)
        if any_error:
            errors: list[tuple[int, str] | None] = [None] * dist.get_world_size(self.group)
            own = None if error is None else (error.sequence if isinstance(error, DataError) else -1, str(error))
            dist.all_gather_object(errors, own, group=self.group)
            raise RanksError(min(each for each in errors if each is not None)[1])
        return bool(any_has_data)

    def _totals_of(self, batch: Batch) -> Tensor:
        """float64 (3,): summed loss, number of targets, and their bytes, of this rank's rows."""
        valid = batch.labels != IGNORE_INDEX
        num_bytes = torch.zeros((), device=valid.device)
        if self.token_bytes is not None:
            num_bytes = torch.where(valid, self.token_bytes[batch.labels.clamp(min=0)], 0).sum()
        losses = self.model.row_losses(batch).to(torch.float64)
        loss_sum = (on_grid(losses, loss_grid(MOST_TOKENS)) if self.bit_equal else losses).sum()
        return torch.stack([value.to(torch.float64) for value in (loss_sum, valid.sum(), num_bytes)])


def require_usable(num_valid: int, bad_rows: int, too_long: int, max_bad_rows: int) -> None:
    """Raise RanksError if validation data has too many bad rows, or no target. too_long: conversations."""
    if bad_rows > max_bad_rows:
        raise RanksError(
            f"data.max_bad_rows = {max_bad_rows}: {bad_rows} rows of the validation data were skipped as bad; fix "
            "them, or increase data.max_bad_rows"
        )
    if num_valid == 0:
        why = f" ({counted(too_long, 'conversation')} of more than training.seq_len + 1 tokens)" if too_long else ""
        raise RanksError(f"validation.sources: they contain no token to predict{why}; add data")
