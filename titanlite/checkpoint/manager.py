"""The checkpoints of a run: resume at the start, save at intervals, save and stop after a signal."""

import signal
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.checkpoint.folder import retain
from titanlite.checkpoint.manifest import Manifest
from titanlite.checkpoint.saver import Saver
from titanlite.checkpoint.start import Start, StartFinder
from titanlite.checkpoint.state import STREAMS
from titanlite.hf.generation_defaults import GENERATION_FILE
from titanlite.ranks.agreement import Agreement, RanksError, warn_on_rank_0
from titanlite.ranks.signals import StopRequest

STOP_AFTER = "checkpoint.stop_after"
_AFTER_FAILURE = "earlier checkpoints are still valid. Fix the cause and restart"


class Checkpoints:
    """The checkpoints of one run; every method is a collective over all ranks.

    finder: finds what the run starts from; its fields are used for saving, too. control_group: a gloo group of all
    ranks that nothing else uses. device: of the tensors. stop: the stop request of this rank. before_save: called with
    the step before each save; a collective that raises on all ranks if the state must not be saved.
    """

    def __init__(
        self,
        finder: StartFinder,
        control_group: dist.ProcessGroup,
        device: torch.device,
        stop: StopRequest,
        before_save: Callable[[int], None],
    ) -> None:
        self._finder = finder
        self._section = finder.section
        self._state = finder.state
        self._group = finder.group
        self._device = device
        self._control = Agreement(control_group, 2)  # number of the stop signal, whether a save has failed
        self._stop = stop
        self._before_save = before_save
        self._start: Start | None = None
        self._saver: Saver | None = None
        self._begun = 0
        self.stopped_by = ""
        """What stopped training before the last step: the name of a signal, or STOP_AFTER; "" if nothing did."""

    def resume(self) -> Start:
        """Load the checkpoint or weights that the run starts from. Raises UserError on all ranks."""
        section, folder = self._section, self._finder.folder
        self._start = self._finder.find()
        if section.enable:
            delete_older = partial(retain, folder, section.keep_latest_k, section.keep_every, {self._start.step})
            defaults = self._start.generation_config
            small_files = {} if defaults is None else {GENERATION_FILE: defaults}
            self._saver = Saver(folder, self._group, section.async_mode, self._device, delete_older, small_files)
        return self._start

    def before_update(self) -> None:
        """Let the device finish the copies of a save before the update changes the tensors. Not a collective."""
        assert self._saver is not None, "checkpoints are not enabled"
        self._saver.hold_copies()

    def after_step(self, step: int, last: bool) -> bool:
        """Save if due; returns whether training stops. To be called at the end of each step.

        last: whether this is the last step. Raises UserError on all ranks if a save has failed and on_save_error is
        "stop".
        """
        assert self._saver is not None, "checkpoints are not enabled"
        stop, save_failed = self._control.exchange([self._stop.number, self._saver.has_failed])
        if stop:
            self.stopped_by = signal.Signals(stop).name
        elif step == self._section.stop_after and not last:
            self.stopped_by = STOP_AFTER
        if self.stopped_by or last:
            self._save_last(step)
            return True
        if save_failed:
            failure = self._saver.take_failure()
            if failure is not None:  # else begin() has already reported it
                self._fail(failure)
        if step % self._section.interval == 0:
            failure = self._saver.take_failure()  # the same on all ranks once the save has ended
            if failure is not None:
                self._fail(failure)
            self._before_save(step)
            try:
                self._saver.begin(self._draft(step), self._full())
                self._begun = step
            except RanksError as error:
                self._fail(str(error))
        return False

    def stop_after(self, step: int, number: int) -> None:
        """Stop after `step` for a signal agreed on after `after_step`. Saves unless `after_step` saved this step."""
        self.stopped_by = signal.Signals(number).name
        self.save_unsaved(step)

    def save_unsaved(self, step: int) -> None:
        """Save `step`, with which the run ends, unless `after_step` saved it. Raises RanksError if the save fails."""
        assert self._saver is not None
        if self._begun != step or self._saver.take_failure() is not None:
            self._save_last(step)

    def _save_last(self, step: int) -> None:
        """Save the last step, or the step at which a signal stops training. Raises RanksError if the save fails."""
        assert self._saver is not None
        self._control.finish()
        self.close()
        self._before_save(step)
        try:
            self._saver.save(self._draft(step), self._full())
        except RanksError as error:
            raise RanksError(f"{error}; {_AFTER_FAILURE}: the run resumes from the latest checkpoint") from None

    def _fail(self, failure: str) -> None:
        """Raise RanksError or warn, according to on_save_error."""
        if self._section.on_save_error == "stop":
            raise RanksError(
                f'{failure}; {_AFTER_FAILURE}, or set checkpoint.on_save_error = "continue" to keep training after '
                "failed saves"
            )
        warn_on_rank_0([f"{failure}; training continues"], self._group)

    def _full(self) -> dict[str, Tensor]:
        return self._state.model_and_optimizer() | self._state.recent() | {STREAMS: self._state.streams(self._group)}

    def _draft(self, step: int) -> Manifest:
        assert self._start is not None
        about = self._finder.about
        return Manifest(
            step=step,
            content="full",
            lineage=self._start.lineage,
            counts=asdict(self._finder.meter.state()),
            facts=about.facts,
            config=about.config,
            versions=about.versions,
            created=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            files={},
            digest=self._state.digest(),
            computations=self._start.computations,
        )

    def close(self) -> None:
        """Wait for a save in progress; logs its failure. To be called on every exit from training."""
        if self._saver is not None:
            failure = self._saver.take_failure()
            if failure is not None:
                warn_on_rank_0([failure], self._group)
