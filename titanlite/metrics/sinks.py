"""Sinks for logged numbers: the console, metrics.jsonl, TensorBoard. Only rank 0 writes."""

import json
import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from titanlite.metrics.config import METRICS_FILE, MetricsConfig
from titanlite.metrics.history import keep_rows
from titanlite.metrics.meter import Record
from titanlite.metrics.validation import ValidationRecord, sum_of
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log

WRITER_MODULE = "tensorboard.summary.writer.event_file_writer"


class Sinks:
    """The console and the files; on ranks other than 0 there are no files, and the logger drops the lines.

    total_steps: see `build_sinks`. Each file flushes every record, so that a later crash of this process does not lose
    it.
    """

    def __init__(self, total_steps: int, files: Sequence["JsonlSink | TensorBoardSink"]) -> None:
        self._total_steps = total_steps
        self._files = files

    def write(self, record: Record | ValidationRecord) -> None:
        """Log the record as one line, and write it to each file. Records come in the order of their steps."""
        if isinstance(record, Record):
            log.info("%s", console_line(record, self._total_steps))
        else:
            log.info("%s", validation_line(record))
        for file in self._files:
            file.write(record)

    def close(self) -> None:
        for file in self._files:
            file.close()


def build_sinks(
    section: MetricsConfig, dump_folder: str | Path, rank: int, total_steps: int, *, resume_step: int
) -> Sinks:
    """Build the sinks: the console, metrics.jsonl and, if enabled, TensorBoard on rank 0; no files on other ranks.

    dump_folder must exist. total_steps: optimizer steps of the entire run, for the console. resume_step: 0 for a new
    run, whose files do not exist yet (`prepare_dump_folder`); otherwise the step from which this run resumes: rows of
    later steps are removed from the files of earlier starts (`keep_rows`, `TensorBoardSink`).
    """
    if rank != 0:
        return Sinks(total_steps, ())
    folder = Path(dump_folder)
    if resume_step:
        keep_rows(folder / METRICS_FILE, resume_step)
    files: list[JsonlSink | TensorBoardSink] = [JsonlSink(folder / METRICS_FILE)]
    if section.enable_tensorboard:
        files.append(TensorBoardSink(folder / section.folder, resume_step))
    return Sinks(total_steps, files)


def console_line(record: Record, total_steps: int) -> str:
    """The record as one line, without unknown values and without zero counts of skipped steps and bad rows."""
    data_share = record.data_time_s / record.step_time_s
    parts = [
        f"step {record.step:>{len(str(total_steps))}}/{total_steps}",
        f"loss {record.loss:.4f}",
        f"grad norm {record.grad_norm:.4g}",
        f"lr {record.lr:.3e}",
        f"{record.tokens_per_second:,.0f} tokens/s",
        f"{record.step_time_s:.3f} s/step, {data_share:.1%} waiting for data",
        f"{record.memory_gib:.2f} GiB",
    ]
    if record.mfu is not None:
        parts.append(f"MFU {record.mfu:.1%}")
    if record.skipped_steps > 0:
        parts.append(f"skipped steps {record.skipped_steps}")
    if record.bad_rows > 0:
        parts.append(f"bad rows {record.bad_rows}")
    parts.append(f"ETA {_duration((total_steps - record.step) * record.step_time_s)}")
    return " | ".join(parts)


def validation_line(record: ValidationRecord) -> str:
    """The record as one line, with the loss of each source if there are several."""
    total = sum_of(record.by_source.values())
    numbers = total.numbers()
    parts = [
        f"validation after step {record.step}",
        f"loss {numbers['loss']:.4f}",
        f"perplexity {numbers['perplexity']:,.2f}",
    ]
    if "bits_per_byte" in numbers:
        parts.append(f"{numbers['bits_per_byte']:.4f} bits per byte")
    parts.append(f"{total.num_valid:,} tokens, {_duration(record.time_s)}")
    of_sources = {name: totals.numbers() for name, totals in record.by_source.items() if len(record.by_source) > 1}
    parts += [f"{name} {found['loss']:.4f}" for name, found in of_sources.items() if found]
    return " | ".join(parts)


def _duration(seconds: float) -> str:
    """Seconds in the two largest units: 42s, 3m 07s, 5h 02m, 2d 03h."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h:02}h"
    if hours:
        return f"{h}h {m:02}m"
    return f"{m}m {s:02}s" if minutes else f"{s}s"


class JsonlSink:
    """Writes one JSON object per line, floats in full precision (reading returns the same float).

    JSON has no numbers for non-finite values: these are the strings "NaN", "Infinity" and "-Infinity", which every JSON
    reader accepts and `float` converts. Each line is a single write to a file opened for appending, so readers always
    see complete lines, also after a crash; only a full disk or a power failure can truncate a line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("ab", buffering=0)
            self._identity = os.fstat(self._file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None

    def write(self, record: Record | ValidationRecord) -> None:
        """Append the line. Raises UserError if the file system fails."""
        line = (json_line(record) + "\n").encode()
        try:
            if not os.path.samestat(os.stat(self._path), self._identity):
                raise UserError(
                    f"{self._path} was replaced during the run; start again: with checkpoints, the run resumes from "
                    "the latest one"
                )
            while line:
                line = line[self._file.write(line) :]  # a write may be partial if the disk is nearly full
        except FileNotFoundError:
            raise UserError(
                f"{self._path} was deleted or its folder renamed during the run; restore job.dump_folder and start "
                "again: with checkpoints, the run resumes from the latest one there"
            ) from None
        except OSError as error:
            raise UserError(
                f"cannot write {self._path}: {error.strerror}; the record of step {record.step} is lost; free space, "
                "or fix the file system, and start again: with checkpoints, the run resumes from the latest one"
            ) from None

    def close(self) -> None:
        self._file.close()


def json_line(record: Record | ValidationRecord) -> str:
    """The record as strict JSON on one line."""
    # A non-finite float becomes the string that json would write without quotes.
    row = {
        key: value if isinstance(value, str) or math.isfinite(value) else json.dumps(value)
        for key, value in record.row().items()
    }
    return json.dumps(row, allow_nan=False)


class TensorBoardSink:
    """Writes scalars under the keys of metrics.jsonl, at their step.

    resume_step: 0, or the step from which the run resumes. Each start writes a new file with a purge step: the points
    of later steps in earlier files stay on disk, but TensorBoard hides them. With `tensorboard --load_fast=true`, it
    hides only those from the first step of the new file on. TensorBoard orders the files by their creation time in
    seconds, by the clocks of their hosts.

    If the file system fails, one warning is logged, and nothing more is written: metrics.jsonl has the same numbers.
    """

    def __init__(self, folder: Path, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._folder = folder
        self._excepthook = threading.excepthook
        threading.excepthook = self._ignore_writer_thread
        self._writer: SummaryWriter | None = None
        with self._warns_once():
            # A new run needs a purge step, too: TensorBoard takes the first one for the beginning of the run.
            self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1)

    def write(self, record: Record | ValidationRecord) -> None:
        """Write and flush the scalars of one step."""
        if self._writer is None:
            return
        with self._warns_once():
            for key, value in record.row().items():
                if key != "step" and not isinstance(value, str):
                    self._writer.add_scalar(key, value, record.step)
            self._writer.flush()

    def close(self) -> None:
        """Close TensorBoard's writer and its thread."""
        if self._writer is not None:
            with self._warns_once():
                self._writer.close()
        threading.excepthook = self._excepthook

    def _ignore_writer_thread(self, args: threading.ExceptHookArgs) -> None:
        """Do not print the traceback of the writer's thread: the next write raises its error here."""
        if type(args.thread).__module__ != WRITER_MODULE:
            self._excepthook(args)

    @contextmanager
    def _warns_once(self) -> Iterator[None]:
        """Inside, an error of the file system ends the writing."""
        try:
            yield
        except OSError as error:
            self._writer = None
            log.warning(
                "cannot write TensorBoard's files in %s: %s; the run continues without them, metrics.jsonl has the "
                "same numbers",
                *(self._folder, error.strerror or error),
            )
