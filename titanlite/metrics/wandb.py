"""Weights & Biases, through its package `wandb`."""

import os
from pathlib import Path
from typing import Any

from titanlite.metrics.about import AboutRun
from titanlite.metrics.config import MetricsConfig
from titanlite.metrics.experts import ExpertsRecord
from titanlite.metrics.records import LogRecord
from titanlite.metrics.samples import SamplesRecord
from titanlite.runtime.logging import log


class WandbService:
    """Logs the rows of metrics.jsonl, with `step` as the axis and `tokens_seen` beside it, to the run of this id.

    W&B itself drops rows of earlier steps. So `step` is an ordinary value: steps that a resumed run computes again are
    shown twice. W&B's variables apply: WANDB_MODE=offline, WANDB_API_KEY, WANDB_ENTITY, ...
    """

    name = "W&B"

    def __init__(self, section: MetricsConfig, folder: Path, about: AboutRun) -> None:
        import wandb  # slow, and in the main thread: other threads do not import

        self._wandb = wandb
        self._section = section
        self._folder = folder
        self._about = about
        self._run: Any = None

    def open(self) -> None:
        """Begin or resume W&B's run. Raises RuntimeError if there is no API key; never asks for one."""
        if os.environ.get("WANDB_MODE", "online") == "online" and not self._wandb.login(prompt=False):
            raise RuntimeError("there is no API key: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline")
        self._run = self._wandb.init(
            project=self._section.project or os.environ.get("WANDB_PROJECT") or "titanlite",
            group=self._section.group or None,
            tags=self._section.tags,
            id=self._about.run_id,
            name=self._folder.absolute().name,
            resume="allow",
            dir=str(self._folder),  # it adds WANDB_FOLDER
            config={**self._about.config, **self._about.facts},
            allow_val_change=True,  # of the configuration, on a resume
            # no capture of the console, no processes of git, no copies of code
            settings=self._wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
        )
        self._run.define_metric("*", step_metric="step")
        log.info("W&B: %s", self._run.dir if self._run.offline else self._run.url)

    def write(self, record: LogRecord) -> None:
        if isinstance(record, ExpertsRecord):
            return  # the columns of Record have the largest and the smallest loads
        if isinstance(record, SamplesRecord):
            table = self._wandb.Table(["prompt", "text"], data=[[*pair] for pair in record.texts])
            self._run.log({"step": record.step, "samples": table})
        else:
            self._run.log({**record.row(), "tokens_seen": record.tokens_seen})

    def close(self) -> None:
        self._run.finish()
