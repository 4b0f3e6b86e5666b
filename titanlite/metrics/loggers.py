"""The loggers of metrics.loggers. Only rank 0 writes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from titanlite.metrics.about import AboutRun
from titanlite.metrics.config import (
    EXPERTS_FILE,
    METRICS_FILE,
    PLUGIN_LOGGERS,
    SAMPLES_FILE,
    TENSORBOARD_FOLDER,
    MetricsConfig,
)
from titanlite.metrics.console import ConsoleLogger
from titanlite.metrics.jsonl import JsonlLogger, keep_lines, keep_rows
from titanlite.metrics.records import ExpertsRow, LogRecord, SampleRow
from titanlite.metrics.slow_loggers import BackgroundLogger, MlflowLogger, SlowLogger, WandbLogger
from titanlite.metrics.tensorboard import TensorBoardLogger
from titanlite.runtime.logging import log
from titanlite.runtime.text import one_line

SLOW_LOGGERS: dict[str, Callable[[MetricsConfig, Path, AboutRun], SlowLogger]] = {
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
}
"""Loggers that a thread calls. Built on rank 0, with [metrics], the dump folder and facts of the run."""


class Logger(Protocol):
    """Takes the records of a run, in the order of their steps. Only metrics.jsonl raises, UserError."""

    def write(self, record: LogRecord) -> None: ...

    def close(self) -> None: ...


class Loggers:
    """All loggers of this rank: none on ranks other than 0.

    Each one flushes every record, so that a later crash of this process does not lose it.
    """

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = loggers

    def write(self, record: LogRecord) -> None:
        for logger in self._loggers:
            logger.write(record)

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()


def build_loggers(
    section: MetricsConfig,
    dump_folder: str | Path,
    rank: int,
    total_steps: int,
    memory_name: str,
    *,
    resume_step: int,
    resume_tokens: int,
    about: AboutRun,
    has_samples: bool,
    has_experts: bool,
) -> Loggers:
    """Build the loggers on rank 0; none on other ranks.

    dump_folder must exist. total_steps: optimizer steps of the entire run, for the console. memory_name: what
    Record.memory_gib is, for the console. resume_step: 0 for a new run, whose files do not exist yet
    (`prepare_dump_folder`); otherwise the step from which this run resumes, after resume_tokens: rows of later steps
    are removed from the files of earlier starts (`keep_rows`, `TensorBoardLogger`).
    """
    if rank != 0:
        return Loggers(())
    folder = Path(dump_folder)
    if resume_step:
        keep_rows(folder / METRICS_FILE, resume_step)
        keep_lines(folder / SAMPLES_FILE, SampleRow, resume_step)
        keep_lines(folder / EXPERTS_FILE, ExpertsRow, resume_step)
    loggers: list[Logger] = []
    # The console last: what a user has seen is in the files, also if the run is interrupted at that moment.
    for name in sorted(dict.fromkeys(section.loggers), key=lambda name: name == "console"):
        match name:
            case "console":
                loggers.append(ConsoleLogger(total_steps, memory_name, section.columns))
            case "jsonl":
                files = [METRICS_FILE, *[SAMPLES_FILE] * has_samples, *[EXPERTS_FILE] * has_experts]
                loggers += [JsonlLogger(folder / file) for file in files]
            case "tensorboard":
                loggers.append(TensorBoardLogger(folder / TENSORBOARD_FOLDER, resume_step, resume_tokens, about))
            case _:
                try:
                    build = SLOW_LOGGERS.get(name) or PLUGIN_LOGGERS[name]
                    loggers.append(BackgroundLogger(build(section, folder, about)))
                except Exception as error:
                    log.warning("%s: %s; the run continues without this logger", name, one_line(error))
    return Loggers(loggers)
