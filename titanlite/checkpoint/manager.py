"""The checkpoints of a run: resume at the start, save at intervals, save and stop after a signal."""

import signal
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from titanlite.checkpoint.config import CheckpointConfig
from titanlite.checkpoint.manifest import Manifest
from titanlite.checkpoint.saver import Retention, Saver
from titanlite.checkpoint.start import RunFacts, Start, StartFinder
from titanlite.checkpoint.state import STREAMS, RunState
from titanlite.hf.folder import ModelFolder
from titanlite.metrics.meter import Meter
from titanlite.runtime.agreement import Control, Flags, RanksError, warn_on_rank_0
from titanlite.runtime.errors import UserError
from titanlite.runtime.signals import StopRequest


class Checkpoints:
    """The checkpoints of one run, in `folder`; every method is a collective over all ranks.

    steps: number of optimizer steps of the run. group: a gloo group of all ranks for saving, also in a thread, and for
    loading; flags use another. control: the per-step agreement on flags. stop: the stop request of this rank.
    imported: Hugging Face model that a new run starts from; None for initial weights or a checkpoint.
    """

    def __init__(
        self,
        section: CheckpointConfig,
        folder: Path,
        state: RunState,
        meter: Meter,
        about: RunFacts,
        *,
        steps: int,
        group: dist.ProcessGroup,
        control: Control,
        stop: StopRequest,
        imported: ModelFolder | None = None,
    ) -> None:
        self._section = section
        self._folder = folder
        self._state = state
        self._meter = meter
        self._about = about
        self._steps = steps
        self._group = group
        self._control = control
        self._stop = stop
        self._imported = imported
        self._start: Start | None = None
        self._saver: Saver | None = None
        self._begun = 0
        self.stopped_by = ""
        """Name of the signal that stopped training before the last step; "" if no signal did."""

    def resume(self) -> Start:
        """Load the checkpoint or weights that the run starts from. Raises UserError on all ranks."""
        section = self._section
        finder = StartFinder(
            *(section, self._folder, self._state, self._meter, self._about),
            steps=self._steps,
            group=self._group,
            imported=self._imported,
        )
        self._start = finder.find()
        if section.enable:
            kept = Retention(section.keep_latest_k, section.keep_every, frozenset({self._start.step}))
            self._saver = Saver(self._folder, self._group, section.async_mode, kept)
        return self._start

    def after_step(self, step: int, last: bool) -> bool:
        """Save if due; returns whether training stops. To be called at the end of each step.

        last: whether this is the last step. Raises UserError on all ranks if a save has failed and on_save_error is
        "stop".
        """
        assert self._saver is not None, "checkpoints are not enabled"
        agreed = self._control.exchange(Flags(stop=self._stop.number, save_failed=self._saver.has_failed))
        if agreed.stop:
            self.stopped_by = signal.Signals(agreed.stop).name
        if agreed.stop or last:
            self._save_last(step)
            return True
        if agreed.save_failed:
            failure = self._saver.take_failure()
            if failure is not None:  # else begin() has already reported it
                self._fail(failure)
        if step % self._section.interval == 0:
            failure = self._saver.take_failure()  # the same on all ranks once the save has ended
            if failure is not None:
                self._fail(failure)
            try:
                self._saver.begin(self._draft(step, "full"), self._full())
                self._begun = step
            except RanksError as error:
                self._fail(str(error))
        return False

    def stop_after(self, step: int, number: int) -> None:
        """Stop after `step` for a signal that all ranks have agreed on since; saves unless after_step did."""
        assert self._saver is not None
        self.stopped_by = signal.Signals(number).name
        if self._begun != step or self._saver.take_failure() is not None:
            self._save_last(step)

    def _save_last(self, step: int) -> None:
        """Save the last step, or the step at which a signal stops training. Raises RanksError if the save fails."""
        assert self._saver is not None
        self._control.finish()
        self.close()
        if step == self._steps and self._section.last_save_model_only:
            self._saver.save(self._draft(step, "model"), self._state.model())
        else:
            self._saver.save(self._draft(step, "full"), self._full())

    def _fail(self, failure: str) -> None:
        """Raise UserError or warn, according to on_save_error."""
        if self._section.on_save_error == "stop":
            raise UserError(
                f"{failure}; earlier checkpoints are still valid. "
                'Fix the cause and restart, or train on after failed saves: --checkpoint.on_save_error "continue"'
            )
        warn_on_rank_0(f"{failure}; training continues", self._group)

    def _full(self) -> dict[str, Tensor]:
        return self._state.model_and_optimizer() | {STREAMS: self._state.streams(self._group)}

    def _draft(self, step: int, content: Literal["full", "model"]) -> Manifest:
        assert self._start is not None
        return Manifest(
            step=step,
            content=content,
            lineage=self._start.lineage,
            counts=asdict(self._meter.state()),
            facts=self._about.facts,
            config=self._about.config,
            versions=self._about.versions,
            created=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            files={},
        )

    def close(self) -> None:
        """Wait for a save in progress; logs its failure. To be called on every exit from training."""
        if self._saver is not None:
            failure = self._saver.take_failure()
            if failure is not None:
                warn_on_rank_0(failure, self._group)
