"""The loggers of metrics.loggers, and the console among them. Only rank 0 writes."""

import json
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Protocol

from titanlite.data.steps import ONE_STAGE, BatchStage, stage_index, tokens_until
from titanlite.metrics.about import AboutRun
from titanlite.metrics.config import (
    EXPERTS_FILE,
    METRICS_FILE,
    PLUGIN_LOGGERS,
    SAMPLES_FILE,
    TENSORBOARD_FOLDER,
    MetricsConfig,
)
from titanlite.metrics.jsonl import JsonlLogger, keep_rows
from titanlite.metrics.records import LogRecord, Record, SamplesRecord, ValidationRecord, scalars
from titanlite.metrics.scores import sum_of
from titanlite.metrics.slow_loggers import BackgroundLogger, MlflowLogger, SlowLogger, WandbLogger
from titanlite.metrics.tensorboard import TensorBoardLogger
from titanlite.runtime.logging import log
from titanlite.runtime.text import duration, one_line

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
    stages: Sequence[BatchStage] = ONE_STAGE,
) -> Loggers:
    """Build the loggers on rank 0; none on other ranks.

    dump_folder must exist. total_steps: optimizer steps of the entire run, stages: its training stages, memory_name:
    what Record.memory_gib is, all for the console. resume_step: 0 for a new run, whose files do not exist yet
    (`prepare_dump_folder`); otherwise the step from which this run resumes, after resume_tokens: rows of later steps
    are removed from the files of earlier starts (`keep_rows`, `TensorBoardLogger`).
    """
    if rank != 0:
        return Loggers(())
    folder = Path(dump_folder)
    if resume_step:
        for file in (METRICS_FILE, SAMPLES_FILE, EXPERTS_FILE):
            keep_rows(folder / file, resume_step)
    loggers: list[Logger] = []
    # The console last: what a user has seen is in the files, also if the run is interrupted at that moment.
    for name in sorted(dict.fromkeys(section.loggers), key=lambda name: name == "console"):
        match name:
            case "console":
                loggers.append(ConsoleLogger(total_steps, memory_name, section.columns, stages))
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


HEADER_EVERY = 20
"""Rows between headers."""


class ConsoleLogger:
    """Logs training records as a table, with a header at the start and after every 20 rows; others as a line each.

    With the date, a row has at most 100 characters, unless it has rare parts or numbers of unusual size. total_steps:
    optimizer steps of the entire run. memory_name: what Record.memory_gib is. keys, stages: see table_lines.
    """

    def __init__(
        self, total_steps: int, memory_name: str, keys: Sequence[str] = (), stages: Sequence[BatchStage] = ONE_STAGE
    ) -> None:
        self._total_steps = total_steps
        self._stages = stages
        self._keys = keys
        self._memory_name = memory_name
        self._num_rows = 0

    def write(self, record: LogRecord) -> None:
        if isinstance(record, Record):
            header, row = table_lines(record, self._total_steps, self._keys, self._stages)
            if self._num_rows == 0:
                log.info("Columns: mean = loss since the last row, wait = for data, GiB = %s", self._memory_name)
                known = scalars(record)
                for key in (key for key in self._keys if key not in known):
                    close = "".join(f'; did you mean "{match}"?' for match in get_close_matches(key, known, 1))
                    log.warning('metrics.columns: the first row of metrics.jsonl has no "%s"%s', key, close)
            if self._num_rows % HEADER_EVERY == 0:
                log.info("%s", header)
            log.info("%s", row)
            self._num_rows += 1
        elif isinstance(record, SamplesRecord):
            for prompt, text in record.texts:
                log.info("sample after step %d: %s", record.step, json.dumps(prompt + text, ensure_ascii=False))
        elif isinstance(record, ValidationRecord):
            log.info("%s", validation_line(record))

    def close(self) -> None:
        """Nothing to close."""


def table_lines(
    record: Record, total_steps: int, keys: Sequence[str] = (), stages: Sequence[BatchStage] = ONE_STAGE
) -> tuple[str, str]:
    """(header, row) of a training record, with columns of further `keys` of its row. Counts of skipped steps, bad rows
    and conversations that are too long follow the columns unless they are 0, and the digest if there is one. stages: of
    the training: a step takes as long as it has tokens."""
    step, row = f"{record.step}/{total_steps}", scalars(record)
    tokens = tokens_until(stages, total_steps) - tokens_until(stages, record.step)
    left = tokens / stages[stage_index(stages, record.step)].tokens
    columns = [
        ("step", 2 * len(str(total_steps)) + 1, step),
        ("loss", 6, _loss(record.loss)),
        ("mean", 6, "-" if record.interval_loss is None else _loss(record.interval_loss)),
        ("norm", 6, _three_digits(record.grad_norm)),
        ("lr", 7, f"{record.lr:.2e}".replace("e-0", "e-").replace("e+0", "e+")),
        ("tok/s", 5, _with_unit(record.tokens_per_second)),
        ("wait", 4, f"{record.data_time_s / record.step_time_s:.0%}"),
        ("GiB", 5, _three_digits(record.memory_gib)),
        *([("MFU", 5, f"{record.mfu:.1%}")] if record.mfu is not None else []),
        *([("epoch", 5, f"{max(record.epochs.values()):.2f}")] if record.epochs else []),
        *((key, max(6, len(key)), _three_digits(row[key]) if key in row else "-") for key in keys),
        ("ETA", 6, duration(left * record.step_time_s).replace(" ", "")),
    ]
    too_long = round(sum(record.too_long.values()))
    rare = [("skipped steps", record.skipped_steps), ("bad rows", record.bad_rows), ("too long", too_long)]
    header = " ".join(f"{name:>{width}}" for name, width, _ in columns)
    values = " ".join(f"{text:>{width}}" for _, width, text in columns)
    digest = [f" | digest {record.digest}"] if record.digest else []
    digest += [f" by {record.computed_by}"] if "," in (record.computed_by or "") else []
    return header, "".join([values, *(f" | {name} {count}" for name, count in rare if count), *digest])


def _loss(loss: float) -> str:
    """Six characters below 100."""
    return f"{loss:.4f}" if loss < 9.99995 else f"{loss:.3f}"


def _three_digits(value: float) -> str:
    """0.0123, 1.20, 12.0, 120; four digits up to 9999."""
    return f"{value:.0f}" if 999.5 <= value < 10_000 else f"{value:#.3g}".rstrip(".")


def _with_unit(value: float) -> str:
    """At most five characters: 709, 12.3k, 1.23M."""
    for unit in ("", "k", "M"):
        if value < 999.5:
            return _three_digits(value) + unit
        value /= 1000
    return f"{_three_digits(value)}G"


def validation_line(record: ValidationRecord) -> str:
    """The record as one line, with the loss of each source if there are several, and the accuracy on each task."""
    total = sum_of(record.by_source.values())
    numbers = total.numbers()
    parts = [f"loss {numbers['loss']:.4f}"] if record.by_source else []
    if "perplexity" in numbers:
        parts.append(f"perplexity {numbers['perplexity']:,.{2 if numbers['perplexity'] < 1000 else 0}f}")
    if "bits_per_byte" in numbers:
        parts.append(f"{numbers['bits_per_byte']:.4f} bits/byte")
    of_sources = {name: totals.numbers() for name, totals in record.by_source.items() if len(record.by_source) > 1}
    parts += [f"{name} {found['loss']:.4f}" for name, found in of_sources.items() if found]
    parts += [f"{name} {scores.describe()}" for name, scores in record.tasks.items() if not scores.in_group]
    parts += [f"too long {total.too_long}"] if total.too_long else []
    return f"validation after step {record.step}: {', '.join(parts)} ({duration(record.time_s)})"
