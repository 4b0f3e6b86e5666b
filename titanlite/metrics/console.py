"""The lines of a run's log about its numbers."""

import json

from titanlite.metrics.meter import Record
from titanlite.metrics.records import LogRecord
from titanlite.metrics.samples import SamplesRecord
from titanlite.metrics.validation import ValidationRecord, sum_of
from titanlite.runtime.logging import log


class ConsoleSink:
    """Logs each record as one line.

    total_steps: optimizer steps of the entire run. memory_name: what Record.memory_gib is.
    """

    def __init__(self, total_steps: int, memory_name: str) -> None:
        self._total_steps = total_steps
        self._memory_name = memory_name

    def write(self, record: LogRecord) -> None:
        if isinstance(record, Record):
            log.info("%s", console_line(record, self._total_steps, self._memory_name))
        elif isinstance(record, SamplesRecord):
            for prompt, text in record.texts:
                log.info("sample after step %d: %s", record.step, json.dumps(prompt + text, ensure_ascii=False))
        else:
            log.info("%s", validation_line(record))

    def close(self) -> None:
        """Nothing to close."""


def console_line(record: Record, total_steps: int, memory_name: str) -> str:
    """The record as one line, without unknown values and without zero counts of skipped steps and bad rows."""
    data_share = record.data_time_s / record.step_time_s
    parts = [
        f"step {record.step:>{len(str(total_steps))}}/{total_steps}",
        f"loss {record.loss:.4f}",
        f"grad norm {record.grad_norm:.4g}",
        f"lr {record.lr:.3e}",
        f"{record.tokens_per_second:,.0f} tokens/s",
        f"{record.step_time_s:.3f} s/step, {data_share:.1%} waiting for data",
        f"{memory_name} {record.memory_gib:.2f} GiB",
    ]
    if record.mfu is not None:
        parts.append(f"MFU {record.mfu:.1%}")
    if record.skipped_steps > 0:
        parts.append(f"skipped steps {record.skipped_steps}")
    if record.bad_rows > 0:
        parts.append(f"bad rows {record.bad_rows}")
    if record.epochs:
        parts.append(f"epoch {max(record.epochs.values()):.2f}")
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
