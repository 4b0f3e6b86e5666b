"""A logger: loss and learning rate in a CSV file, for a spreadsheet.

Use it with

    [job]
    plugins = ["logger.py"]
    [metrics]
    loggers = ["console", "jsonl", "csv"]
"""

import csv
from pathlib import Path

import titanlite
from titanlite.metrics.about import AboutRun
from titanlite.metrics.config import MetricsConfig
from titanlite.metrics.records import LogRecord, Record


class CsvService:
    """Appends a row per logged step to metrics.csv in the dump folder.

    Built on rank 0. A thread of its own calls open, write and close, so that no step waits for them; if one raises, the
    run continues without this logger, with a warning.
    """

    name = "CSV"

    def __init__(self, section: MetricsConfig, folder: Path, about: AboutRun) -> None:  # noqa: ARG002
        self._path = folder / "metrics.csv"

    def open(self) -> None:
        is_new = not self._path.exists()
        self._file = self._path.open("a", newline="")
        self._rows = csv.writer(self._file)
        if is_new:
            self._rows.writerow(["step", "loss", "lr"])

    def write(self, record: LogRecord) -> None:
        """record: of training; others (validation, samples, experts) are left out."""
        if isinstance(record, Record):
            self._rows.writerow([record.step, record.loss, record.lr])
            self._file.flush()

    def close(self) -> None:
        self._file.close()


titanlite.register_logger("csv", CsvService)
