"""Where logged numbers go: the console, metrics.jsonl, TensorBoard. One rank writes."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Protocol

from titanlite.metrics.meter import Record
from titanlite.runtime.errors import Problem, UserError, require
from titanlite.runtime.logging import log

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class MetricsConfig:
    """What is logged, and where."""

    log_freq: int = 10
    """Steps between log lines; step 1 and the last step are always logged."""
    enable_tensorboard: bool = False
    """Whether the logged numbers also go to TensorBoard."""
    folder: str = "tb"
    """TensorBoard's folder, inside job.dump_folder."""


def check_metrics(section: MetricsConfig) -> list[Problem]:
    """Problems of [metrics]."""
    folder = PurePath(section.folder)
    inside = bool(folder.parts) and not folder.is_absolute() and ".." not in folder.parts
    own = ("checkpoint", "config.toml", METRICS_FILE)
    return [
        *require(section.log_freq >= 1, "metrics.log_freq", section.log_freq, "at least 1", "1 logs every step"),
        *require(
            inside,
            "metrics.folder",
            section.folder,
            "a folder inside job.dump_folder: not empty, relative, without '..'",
            'a plain name such as "tb"',
        ),
        *require(
            not inside or folder.parts[0] not in own,
            "metrics.folder",
            section.folder,
            f"none of the names that the run itself writes ({', '.join(own)})",
            'another name, such as "tb"',
        ),
    ]


class Sink(Protocol):
    """Something that takes records, in the order of their steps."""

    def write(self, record: Record) -> None:
        """Take one record; whatever is written is out of this process's hands on return."""

    def close(self) -> None:
        """End writing; nothing is written after it."""


class Sinks:
    """Several sinks as one; none at all on ranks that do not write."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, record: Record) -> None:
        """Hand `record` to each sink."""
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Close each sink."""
        for sink in self._sinks:
            sink.close()


def build_sinks(section: MetricsConfig, dump_folder: str | Path, rank: int, total_steps: int) -> Sinks:
    """Console, metrics.jsonl and, where enabled, TensorBoard on rank 0; nothing on the others.

    dump_folder exists (`prepare_dump_folder`). total_steps: optimizer steps of the whole run, for the console.
    """
    if rank != 0:
        return Sinks(())
    folder = Path(dump_folder)
    sinks: list[Sink] = [ConsoleSink(total_steps), JsonlSink(folder / METRICS_FILE)]
    if section.enable_tensorboard:
        sinks.append(TensorBoardSink(folder / section.folder))
    return Sinks(sinks)


class ConsoleSink:
    """One line per record, for a person."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps

    def write(self, record: Record) -> None:
        """Log the line."""
        log.info("%s", console_line(record, self._total_steps))

    def close(self) -> None:
        """Nothing to end."""


def console_line(record: Record, total_steps: int) -> str:
    """The record as one line; what is not known, and counts of trouble that did not happen, are left out."""
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


def _duration(seconds: float) -> str:
    """Seconds as the two largest units that say something: 42s, 3m 07s, 5h 02m, 2d 03h."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h:02}h"
    if hours:
        return f"{h}h {m:02}m"
    return f"{m}m {s:02}s" if minutes else f"{s}s"


class JsonlSink:
    """One JSON object per line, floats in full precision (what is read back is the same float).

    JSON has no number for what is not finite: such values are the strings "NaN", "Infinity" and "-Infinity", which
    every JSON reader accepts and `float` turns back. Each line is one write to a file opened for appending, so
    a reader at any moment, and after a crash, sees whole lines; an unfinished last line that a full disk or a power cut
    has left is cut off before the first append, and the log says so.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            _cut_unfinished_line(path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None

    def write(self, record: Record) -> None:
        """Append the line. Raises UserError where the file system does not take it."""
        line = (json_line(record) + "\n").encode()
        try:
            while line:
                line = line[self._file.write(line) :]  # a second write only where the disk took a part
        except OSError as error:
            raise UserError(
                f"cannot write {self._path}: {error.strerror}; the record of step {record.step} is lost"
            ) from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def json_line(record: Record) -> str:
    """The record as strict JSON on one line."""
    row = {key: value if math.isfinite(value) else _json_name(value) for key, value in record.row().items()}
    return json.dumps(row, allow_nan=False)


def _json_name(value: float) -> str:
    """What stands for a float that is not finite."""
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _cut_unfinished_line(path: Path) -> None:
    """Shorten the file at `path`, if there is one, to its last line end."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
            os.fsync(file.fileno())
            log.warning("%s ended in an unfinished line; its %d bytes were cut off", path, len(content) - whole)


class TensorBoardSink:
    """Scalars under the keys of metrics.jsonl, at their step."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and rarely wanted

        self._writer = SummaryWriter(str(folder))

    def write(self, record: Record) -> None:
        """Write and flush the scalars of one step."""
        for key, value in record.row().items():
            if key != "step":
                self._writer.add_scalar(key, value, record.step)
        self._writer.flush()

    def close(self) -> None:
        """End TensorBoard's writer and its thread."""
        self._writer.close()
