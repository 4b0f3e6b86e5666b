"""Checkpoints of a run: where it starts from, when it saves, and when it stops."""

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
from titanlite.runtime.agreement import Control, Flags, RanksError, warn_once
from titanlite.runtime.errors import UserError
from titanlite.runtime.signals import StopRequest


class Checkpoints:
    """The checkpoints of one run, in `folder`; all ranks call everything alike.

    steps: of the whole run. group: of gloo, over all ranks, for everything but the flags; a thread saves with it.
    control: what the ranks agree on at each step. stop: whether this rank has been asked to end. imported: the model
    that a new run starts with, where it is not a checkpoint.
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
        """Name of the signal that has ended training before its last step."""

    def resume(self) -> Start:
        """Loads what the run goes on from. Raises UserError on all ranks."""
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
        """At the end of each step: saves where it is time, and says whether training stops here.

        last: whether it is the last step in any case. Raises UserError on all ranks where a save has failed and
        training is to stop then.
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
            if failure is not None:  # else the next save has come upon it already
                self._fail(failure)
        if step % self._section.interval == 0:
            failure = self._saver.take_failure()  # all ranks know of it once the save has ended
            if failure is not None:
                self._fail(failure)
            try:
                self._saver.begin(self._draft(step, "full"), self._full())
                self._begun = step
            except RanksError as error:
                self._fail(str(error))
        return False

    def stop_after(self, step: int, number: int) -> None:
        """Ends training there for a signal that all ranks have agreed on since; saves, where after_step has not."""
        assert self._saver is not None
        self.stopped_by = signal.Signals(number).name
        if self._begun != step or self._saver.take_failure() is not None:
            self._save_last(step)

    def _save_last(self, step: int) -> None:
        """Of the last step, or of the one at which a signal ends training: this save has to succeed."""
        assert self._saver is not None
        self._control.finish()
        self.close()
        if step == self._steps and self._section.last_save_model_only:
            self._saver.save(self._draft(step, "model"), self._state.model())
        else:
            self._saver.save(self._draft(step, "full"), self._full())

    def _fail(self, failure: str) -> None:
        """What on_save_error says."""
        if self._section.on_save_error == "stop":
            raise UserError(
                f"{failure}; the checkpoints before it are whole. "
                'Mend the cause and start again, or let training go on: --checkpoint.on_save_error "continue"'
            )
        warn_once(f"{failure}; training goes on", self._group)

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
        """Until nothing is being saved any more; what goes wrong with that is said. On every way out of training."""
        if self._saver is not None:
            failure = self._saver.take_failure()
            if failure is not None:
                warn_once(failure, self._group)
