"""Evaluation: the loss of a model over validation data, each token once, independent of the mesh."""

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.batch import IGNORE_INDEX, Batch
from titanlite.data.config import ValidationConfig
from titanlite.data.loader import Loader
from titanlite.data.tasks import EncodedTask
from titanlite.data.tokenizer import Tokenizer
from titanlite.forward import ModelOnMesh, forward_only, on_device
from titanlite.metrics.meter import Meter
from titanlite.metrics.sinks import Sinks
from titanlite.metrics.validation import SetTotals, ValidationRecord
from titanlite.runtime.agreement import RanksError
from titanlite.runtime.errors import DataError
from titanlite.runtime.failure import FailureReport
from titanlite.runtime.logging import log
from titanlite.runtime.signals import StoppedError, StopRequest
from titanlite.runtime.text import counted
from titanlite.tasks import TaskEvaluator


def build_token_bytes(tokenizer: Tokenizer | None, vocab_size: int, device: torch.device) -> Tensor | None:
    """Number of text bytes of each token: int64 (vocab_size,); None if the tokenizer does not define it."""
    sizes = tokenizer.token_bytes() if tokenizer else None
    if sizes is None:
        log.info("Validation: no bits per byte, since %s", why_no_bytes(tokenizer))
        return None
    table = torch.zeros(vocab_size, dtype=torch.int64)
    table[: len(sizes)] = torch.tensor(sizes)
    return table.to(device)


def why_no_bytes(tokenizer: Tokenizer | None) -> str:
    """Reason why the number of bytes per token is unknown."""
    return "there is no tokenizer" if tokenizer is None else "the tokenizer is not byte-level"


PROGRESS_EVERY_S = 30.0
"""Seconds between log lines during a validation."""


class Progress:
    """Logs how many batches of a validation have been computed, at most every PROGRESS_EVERY_S.

    Counts on the host, which may be ahead of the device. names: of the sources. steps: as for Evaluator.totals.
    """

    def __init__(self, names: Sequence[str], steps: int, clock: Callable[[], float] = perf_counter) -> None:
        self._names = names
        self._limit = "" if steps < 0 else f" of at most {steps:,}"
        self._clock = clock
        self._start = self._last = clock()

    def after_batch(self, name: str, number: int) -> None:
        """Note that `number` global batches of the source are done."""
        now = self._clock()
        if now - self._last >= PROGRESS_EVERY_S:
            self._last = now
            source = f"source {self._names.index(name) + 1} of {len(self._names)}, {name}"
            log.info("validation: %s: batch %s%s, after %.0f s", source, f"{number:,}", self._limit, now - self._start)


@dataclass(frozen=True)
class Evaluator:
    """Sums the loss of a model over entire data sets. Its methods are collectives.

    group: gloo group of all ranks, to agree whether data is left, before each step. token_bytes: int64 (vocab_size,),
    number of text bytes of each token, on the device; None if unknown. stop: this rank's stop request. in_nats: whether
    the model's loss is the cross-entropy in nats.
    """

    model: ModelOnMesh
    group: dist.ProcessGroup
    token_bytes: Tensor | None
    stop: StopRequest
    in_nats: bool = True

    def totals(
        self, loader: Loader, *, steps: int, failure: FailureReport, after_batch: Callable[[int], None] = lambda _: None
    ) -> tuple[SetTotals, int]:
        """(totals over the loader's data, number of rows skipped as bad).

        steps: maximum number of steps of the loader; -1: all. after_batch: called with the number of each step, from 1.
        The loader must be at its beginning, and is reset to it afterwards. Weights, gradients, random state and the
        position in the training data do not change. One host read, at the end. Raises StoppedError on all ranks if a
        rank has a stop request. Raises DataError if this rank's data is invalid, after `failure` has collected the data
        errors of all ranks in this step.
        """
        model = self.model
        # loss_sum, num_valid, num_bytes, bad_rows, too_long; the counts are exact up to 2^53.
        totals = torch.zeros(5, dtype=torch.float64, device=model.device)
        try:
            with forward_only(model):
                for number, batches in enumerate(self._batches(loader, steps, failure), start=1):
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
        self, loaders: Mapping[str, Loader], *, steps: int, max_bad_rows: int, failure: FailureReport
    ) -> Iterator[tuple[str, SetTotals]]:
        """(name, totals) of one loader after the other; steps and failure: see `totals`.

        After the last loader, raises RanksError if there were more than `max_bad_rows` bad rows in total,
        or no token to predict in any of them.
        """
        bad_rows, too_long, any_valid, progress = 0, 0, False, Progress(list(loaders), steps)
        for name, loader in loaders.items():
            after_batch = partial(progress.after_batch, name)
            totals, bad = self.totals(loader, steps=steps, failure=failure, after_batch=after_batch)
            bad_rows += bad
            too_long += totals.too_long or 0
            any_valid |= totals.num_valid > 0
            yield name, totals
        if bad_rows > max_bad_rows:
            raise RanksError(
                f"data.max_bad_rows = {max_bad_rows}: {bad_rows} rows of the validation data were skipped as bad; fix "
                "them, or increase data.max_bad_rows"
            )
        if loaders and not any_valid:
            why = f" ({counted(too_long, 'conversation')} of more than training.seq_len + 1 tokens)" if too_long else ""
            raise RanksError(f"validation.sources: they contain no token to predict{why}; add data")

    def _batches(self, loader: Loader, steps: int, failure: FailureReport) -> Iterator[Sequence[Batch]]:
        """Batches of each step of the loader, until the loaders of all ranks are exhausted."""
        done = 0
        while done != steps:
            batches, error, has_data = None, None, not all(loader.ended)
            if has_data:
                try:
                    batches = loader.next_step()
                except DataError as raised:
                    error = raised
                    failure.note_data_error(error)
            if not self._any_has_data(has_data):
                return
            if error is not None:
                raise error
            yield batches if batches is not None else loader.next_step()
            done += 1

    def _any_has_data(self, has_data: bool) -> bool:
        """Whether any rank has data left. A CPU all-reduce. Raises StoppedError if a rank has a stop request."""
        flags = torch.tensor([has_data, self.stop.number], dtype=torch.int64)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        any_has_data, stop = flags.tolist()
        if stop:
            raise StoppedError(stop)
        return bool(any_has_data)

    def _totals_of(self, batch: Batch) -> Tensor:
        """float64 (3,): summed loss, number of targets, and their bytes, of this rank's rows."""
        valid = batch.labels != IGNORE_INDEX
        num_bytes = torch.zeros((), device=valid.device)
        if self.token_bytes is not None:
            num_bytes = torch.where(valid, self.token_bytes[batch.labels.clamp(min=0)], 0).sum()
        loss_sum = self.model.row_losses(batch).to(torch.float64).sum()
        return torch.stack([value.to(torch.float64) for value in (loss_sum, valid.sum(), num_bytes)])


@dataclass(frozen=True)
class Validation:
    """Validation of a run: its interval, sources, tasks and outputs.

    loaders: of this rank, by name of the source. max_bad_rows: data.max_bad_rows, for each validation. missing: whether
    the step from which the run resumes has not been validated yet.
    """

    section: ValidationConfig
    evaluator: Evaluator
    loaders: Mapping[str, Loader]
    task_evaluator: TaskEvaluator
    tasks: Sequence[EncodedTask]
    meter: Meter
    sinks: Sinks
    max_bad_rows: int
    missing: bool

    def is_due(self, step: int, last: bool) -> bool:
        """Whether to validate after `step`. last: whether it is the last step of the run."""
        return last or step % self.section.interval == 0

    def after_step(self, step: int, failure: FailureReport) -> int:
        """Validate and write a row; return 0, or the number of the signal that interrupted the validation.

        A collective over all ranks. Raises RanksError if there is no token to predict or there are too
        many bad rows, DataError as Evaluator.totals does.
        """
        with self.meter.left_out() as clock:
            try:
                totals = self.evaluator.totals_by_name(
                    self.loaders, steps=self.section.steps, max_bad_rows=self.max_bad_rows, failure=failure
                )
                by_source = dict(totals)
                scores = {encoded.task.name: self.task_evaluator.scores(encoded) for encoded in self.tasks}
            except StoppedError as stopped:
                name = signal.Signals(stopped.number).name
                log.info(
                    "validation after step %d: cut by %s after %.0f s, without a result; the next start repeats it",
                    *(step, name, clock()),
                )
                return stopped.number
            self.sinks.write(ValidationRecord(step, by_source, clock(), self.meter.tokens_seen, scores))
        return 0
