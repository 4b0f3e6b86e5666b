"""TensorBoard's files."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from titanlite.metrics.about import AboutRun
from titanlite.metrics.records import ExpertsRecord, LogRecord, Record, SamplesRecord, ValidationRecord, scalars
from titanlite.runtime.logging import log
from titanlite.runtime.text import one_line

WRITER_MODULE = "tensorboard.summary.writer.event_file_writer"
TOKENS_FOLDER = "by_tokens"
CELL = 8


class TensorBoardLogger:
    """Writes scalars under the keys of metrics.jsonl, at their step, and losses also at the tokens seen so far.

    At each start, also the resolved configuration and `AboutRun.facts`, as text and as hyper-parameters.

    resume_step: 0, or the step from which the run resumes, after resume_tokens. Each start writes new files with a
    purge step: the points of later steps in earlier files stay on disk, but TensorBoard hides them. With `tensorboard
    --load_fast=true`, it hides only those from the first step of the new file on. TensorBoard orders the files by their
    creation time in seconds, by the clocks of their hosts. A purge step applies to all tags of a folder, so points by
    tokens have a folder of their own.

    If a write fails, one warning is logged, and nothing more is written: metrics.jsonl has the same numbers.
    """

    def __init__(self, folder: Path, resume_step: int, resume_tokens: int, about: AboutRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import
        from torch.utils.tensorboard.summary import hparams

        self._folder = folder
        self._excepthook = threading.excepthook
        threading.excepthook = self._ignore_writer_thread
        self._writers: tuple[SummaryWriter, ...] = ()
        with self._warns_once():
            # A new run needs a purge step, too: TensorBoard takes the first one for the beginning of the run.
            by_step = SummaryWriter(str(folder), purge_step=resume_step + 1)
            by_tokens = SummaryWriter(str(folder / TOKENS_FOLDER), purge_step=resume_tokens + 1)
            self._writers = (by_step, by_tokens)
            by_step.add_text("config", f"```toml\n{about.config_toml}```", resume_step)
            by_step.add_text("run", "\n".join(f"- {key}: {text}" for key, text in about.facts.items()), resume_step)
            for summary in hparams({**about.config, **about.facts}, {"loss": 0.0}):
                by_step._get_file_writer().add_summary(summary)  # add_hparams would begin another folder
            by_step.flush()

    def write(self, record: LogRecord) -> None:
        """Write and flush the scalars of one step."""
        if not self._writers:
            return
        by_step, by_tokens = self._writers
        with self._warns_once():
            if isinstance(record, SamplesRecord):
                texts = (f"```text\n{prompt}{text}\n```" for prompt, text in record.texts)
                by_step.add_text("samples", "\n\n".join(texts), record.step)
            elif isinstance(record, ExpertsRecord):
                by_step.add_image("loads of experts by block", heat_map(record.loads), record.step, dataformats="HW")
            elif isinstance(record, Record | ValidationRecord):
                for key, value in scalars(record).items():
                    by_step.add_scalar(key, value, record.step)
                    if "loss" in key.split("/"):
                        by_tokens.add_scalar(f"{TOKENS_FOLDER}/{key}", value, record.tokens_seen)
            by_step.flush()
            by_tokens.flush()

    def close(self) -> None:
        """Close TensorBoard's writers and their threads."""
        with self._warns_once():
            for writer in self._writers:
                writer.close()
        threading.excepthook = self._excepthook

    def _ignore_writer_thread(self, args: threading.ExceptHookArgs) -> None:
        """Do not print the traceback of a writer's thread: the next write raises its error here."""
        if type(args.thread).__module__ != WRITER_MODULE:
            self._excepthook(args)

    @contextmanager
    def _warns_once(self) -> Iterator[None]:
        """Inside, an error ends the writing."""
        try:
            yield
        except Exception as error:
            self._writers = ()
            log.warning(
                "cannot write TensorBoard's files in %s: %s; the run continues without them, metrics.jsonl has the "
                "same numbers",
                *(self._folder, one_line(error)),
            )


def heat_map(loads: list[list[int]]) -> npt.NDArray[np.uint8]:
    """A square of CELL x CELL pixels per expert, a row per block: white is twice the mean of the block, or more."""
    counts = np.array(loads, np.float64)
    relative = counts / np.maximum(counts.mean(axis=1, keepdims=True), 1)
    return np.kron(255 * np.minimum(relative / 2, 1), np.ones((CELL, CELL))).astype(np.uint8)
