"""Validation of a run: when, on what, and where its results go."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from titanlite.data.config import ValidationConfig
from titanlite.data.loader import Loader
from titanlite.evaluation.evaluator import Evaluator, Tasks
from titanlite.metrics.loggers import Loggers
from titanlite.metrics.meter import Meter
from titanlite.metrics.records import ValidationRecord
from titanlite.ranks.agreement import all_ranks_arrive
from titanlite.ranks.signals import StoppedError
from titanlite.runtime.logging import log

ARRIVE_S = 5.0
"""Time in which all ranks find an error that all of them raise."""


@dataclass(frozen=True)
class Validation:
    """Validation of a run: its interval, sources, tasks and outputs.

    loaders: of this rank, by name of the source. tasks: None without validation.tasks. max_bad_rows:
    data.max_bad_rows, for each validation. missing: whether the step from which the run resumes has not been validated
    yet.
    """

    section: ValidationConfig
    evaluator: Evaluator
    loaders: Mapping[str, Loader]
    tasks: Tasks | None
    meter: Meter
    loggers: Loggers
    max_bad_rows: int
    missing: bool

    def is_due(self, step: int, last: bool) -> bool:
        """Whether to validate after `step`. last: whether it is the last step of the run."""
        return last or step % (self.section.interval if self.loaders else self.task_interval) == 0

    @property
    def task_interval(self) -> int:
        """Steps between evaluations on tasks."""
        return self.section.interval if self.section.task_interval == -1 else self.section.task_interval

    def after_step(self, step: int, last: bool) -> int:
        """Validate and write a row; return 0, or the number of the signal that interrupted the validation.

        Tasks are evaluated at multiples of validation.task_interval, and after the last step.
        A collective over all ranks. Raises RanksError if data is bad, or there is no token to predict.
        """
        with self.meter.left_out() as clock:
            try:
                totals = self.evaluator.totals_by_name(
                    self.loaders, steps=self.section.steps, max_bad_rows=self.max_bad_rows
                )
                by_source = dict(totals)
                is_due = last or step % self.task_interval == 0
                scores = self.evaluator.scores(self.tasks) if self.tasks and is_due else {}
            except StoppedError as stopped:
                name = signal.Signals(stopped.number).name
                log.info(
                    "validation after step %d: cut by %s after %.0f s, without a result; the next start repeats it",
                    *(step, name, clock()),
                )
                return stopped.number
            self.loggers.write(ValidationRecord(step, by_source, clock(), self.meter.tokens_seen, scores))
        return 0

    def fails_on_all_ranks(self) -> bool:
        """Whether all ranks have left `after_step` with an error, and not only some, for which the others wait."""
        return all_ranks_arrive(self.evaluator.group, ARRIVE_S)
