"""Evaluation: the loss of a model over data that it is not trained on, each token once, whatever the mesh."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.batch import IGNORE_INDEX, Batch
from titanlite.data.config import ValidationConfig
from titanlite.data.loader import Loader
from titanlite.data.tokenizer import Tokenizer
from titanlite.forward import ModelOnMesh, on_device
from titanlite.metrics.meter import Meter
from titanlite.metrics.sinks import Sinks
from titanlite.metrics.validation import SetTotals, ValidationRecord
from titanlite.parallel.data import wrapped_modules
from titanlite.runtime.errors import DataError, UserError
from titanlite.runtime.failure import FailureReport
from titanlite.runtime.logging import log
from titanlite.runtime.signals import StopRequest


def build_token_bytes(tokenizer: Tokenizer | None, vocab_size: int, device: torch.device) -> Tensor | None:
    """The bytes of text that each token of the model stands for; None where the tokenizer does not say."""
    sizes = tokenizer.token_bytes() if tokenizer else None
    if sizes is None:
        log.info("Validation: without bits per byte, since %s", why_no_bytes(tokenizer))
        return None
    table = torch.zeros(vocab_size, dtype=torch.int64)
    table[: len(sizes)] = torch.tensor(sizes)
    return table.to(device)


def why_no_bytes(tokenizer: Tokenizer | None) -> str:
    """Of a tokenizer that does not say how many bytes its tokens stand for."""
    return "there is no tokenizer" if tokenizer is None else "the tokenizer is not byte-level"


class StoppedError(Exception):
    """All ranks have agreed to stop. number: of the signal that asks for it."""

    def __init__(self, number: int) -> None:
        self.number = number


class Evaluator:
    """Sums the loss of a model over whole data sets. All ranks call it alike.

    group: of gloo, over all ranks: they agree there on each batch. token_bytes: int64 (vocab_size,), the bytes of text
    that each token stands for, on the device; None: not known. stop: whether this rank has been asked to end.
    """

    def __init__(
        self, model: ModelOnMesh, group: dist.ProcessGroup, token_bytes: Tensor | None, stop: StopRequest
    ) -> None:
        self._model = model
        self._group = group
        self._token_bytes = token_bytes
        self._stop = stop

    def totals(self, loader: Loader, *, steps: int, failure: FailureReport) -> tuple[SetTotals, int]:
        """(the totals over all that the loader gives until it ends, the rows that it has skipped as bad).

        steps: of the loader, at most; -1: all. The loader has given nothing yet, and is set to its beginning again.
        Nothing of the model changes: not its weights, gradients, random state or place in the data. The device is
        read once, at the end. Raises StoppedError on all ranks; DataError where this rank's data cannot be used, once
        `failure` has heard of those of all ranks in the same step.
        """
        model = self._model
        # Its last three are counts, exact up to 2^53.
        totals = torch.zeros(4, dtype=torch.float64, device=model.device)
        try:
            with forward_only(model):
                for batches in self._batches(loader, steps, failure):
                    for batch in batches:
                        totals[:3] += self._totals_of(on_device(batch, model.device))
            totals[:3] *= model.counts_loss
            totals[3] += loader.bad_rows * model.counts_rows
        finally:
            loader.restart()
        dist.all_reduce(totals)
        loss_sum, *counts = totals.tolist()
        num_valid, num_bytes, bad_rows = (int(count) for count in counts)
        return SetTotals(loss_sum, num_valid, None if self._token_bytes is None else num_bytes), bad_rows

    def totals_by_name(
        self,
        loaders: Mapping[str, Loader],
        *,
        steps: int,
        max_bad_rows: int,
        failure: FailureReport,
    ) -> Iterator[tuple[str, SetTotals]]:
        """(name, its totals), one loader after the other; steps and failure as of `totals`.

        Raises also UserError, on all ranks alike, in the end: where more than `max_bad_rows` rows of all of them turned
        out bad, or there was nothing to predict.
        """
        bad_rows, any_valid = 0, False
        for name, loader in loaders.items():
            totals, bad = self.totals(loader, steps=steps, failure=failure)
            bad_rows += bad
            any_valid |= totals.num_valid > 0
            yield name, totals
        if bad_rows > max_bad_rows:
            raise UserError(
                f"data.max_bad_rows = {max_bad_rows}: {bad_rows} rows of the validation data were skipped as bad; mend "
                "them, or raise data.max_bad_rows"
            )
        if not any_valid:
            raise UserError("validation.sources: there is no token to predict in them: add data")

    def _batches(self, loader: Loader, steps: int, failure: FailureReport) -> Iterator[Sequence[Batch]]:
        """Those of each step of the loader, on all ranks until it has ended on all: a rank's own may end before."""
        done = 0
        while done != steps:
            batches, error, has_ended = None, None, all(loader.ended)
            if not has_ended:
                try:
                    batches = loader.next_step()
                except DataError as raised:
                    error = raised
                    failure.note_data_error(error)
            if not self._agree(goes_on=not has_ended):
                return
            if error is not None:
                raise error
            yield batches if batches is not None else loader.next_step()
            done += 1

    def _agree(self, *, goes_on: bool) -> bool:
        """Whether any rank has something left. A collective of a few bytes between hosts. Raises StoppedError."""
        said = torch.tensor([goes_on, self._stop.number], dtype=torch.int64)
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self._group)
        any_goes_on, stop = said.tolist()
        if stop:
            raise StoppedError(stop)
        return bool(any_goes_on)

    def _totals_of(self, batch: Batch) -> Tensor:
        """float64 (3,): loss, targets and their bytes. On each rank that has them."""
        valid = batch.labels != IGNORE_INDEX
        num_bytes = torch.zeros((), device=valid.device)
        if self._token_bytes is not None:
            num_bytes = torch.where(valid, self._token_bytes[batch.labels.clamp(min=0)], 0).sum()
        loss_sum = self._model.row_losses(batch).to(torch.float64).sum()
        return torch.stack([value.to(torch.float64) for value in (loss_sum, valid.sum(), num_bytes)])


@contextmanager
def forward_only(model: ModelOnMesh) -> Iterator[None]:
    """Inside, the model only computes. Afterwards its modes, torch's random numbers and its sharding are as before."""
    parts, device = model.model_parts, model.device
    modes = [part.training for part in parts]
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        for part in parts:
            part.eval()
        try:
            yield
        finally:
            for part, mode in zip(parts, modes, strict=True):
                part.train(mode)
                # What stays gathered would be used again after the next update, with the weights of now.
                for module in wrapped_modules(part):
                    module.reshard()


@dataclass(frozen=True)
class Validation:
    """Validation of a run: when, on which sources, and where the numbers go.

    loaders: of this rank, by name of the source. max_bad_rows: as of [data], of each validation. missing: whether the
    step that the run goes on after has none so far.
    """

    section: ValidationConfig
    evaluator: Evaluator
    loaders: Mapping[str, Loader]
    meter: Meter
    sinks: Sinks
    max_bad_rows: int
    missing: bool

    def after_step(self, step: int, last: bool, failure: FailureReport) -> int:
        """Validates where it is due, and writes a row; the number of the signal that has ended it before, else 0.

        last: whether it is the last step of the run. A collective over all ranks. Raises UserError on all of them where
        there is nothing to validate on or too much of it is bad, DataError as Evaluator.totals.
        """
        if step % self.section.interval and not last:
            return 0
        with self.meter.left_out() as clock:
            try:
                found = dict(
                    self.evaluator.totals_by_name(
                        self.loaders,
                        steps=self.section.steps,
                        max_bad_rows=self.max_bad_rows,
                        failure=failure,
                    )
                )
            except StoppedError as stopped:
                return stopped.number
            self.sinks.write(ValidationRecord(step, found, clock()))
        return 0

    def close(self) -> None:
        """End the loaders' threads."""
        for loader in self.loaders.values():
            loader.close()
