"""W&B and MLflow, through their packages, and the thread that hands records to a slow logger, so that no step waits.

W&B and MLflow leave out records of experts: the columns of Record have the largest and the smallest loads.
"""

import configparser
import os
import queue
import re
import threading
import time
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from titanlite.metrics.about import AboutRun
from titanlite.metrics.config import MLFLOW_FOLDER, MetricsConfig
from titanlite.metrics.records import LogRecord, Record, SamplesRecord, ValidationRecord, scalars
from titanlite.runtime.files import open_regular
from titanlite.runtime.logging import log
from titanlite.runtime.text import one_line

MAX_PENDING = 10_000
CLOSE_S = 60.0
SHOWN_AFTER_S = 2.0
"""A longer wait is announced."""
RUN_TAG = "titanlite.run_id"
MAX_PARAMS = 100
"""Of one request."""
MAX_SETTINGS_BYTES = 2**20
HARMLESS_SETTINGS = {"entity", "mode", "project"}
WANDB_URL = "https://api.wandb.ai"
"""`wandb init` writes it into a folder's settings, with entity and project."""
MAX_TEXT = 500
"""Characters of a parameter or a tag that every server accepts."""


class SlowLogger(Protocol):
    """A logger whose calls may wait for a network. `open` is called first, and all calls come from one thread."""

    name: str

    def open(self) -> None: ...

    def write(self, record: LogRecord) -> None: ...

    def close(self) -> None: ...


class BackgroundLogger:
    """Calls a slow logger from a thread of its own.

    An error of that logger, or more than MAX_PENDING records that it has not taken, ends it with one warning. `close`
    waits up to CLOSE_S seconds for the pending records.
    """

    def __init__(self, logger: SlowLogger) -> None:
        self._name = logger.name
        self._pending: queue.Queue[LogRecord | None] = queue.Queue(MAX_PENDING)
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, args=(logger,), name=logger.name, daemon=True)
        self._thread.start()

    def write(self, record: LogRecord | None) -> None:
        """Queue the record, or the end; never waits."""
        if self._has_failed:
            return
        try:
            self._pending.put_nowait(record)
        except queue.Full:
            self._warn(f"it has not taken the last {MAX_PENDING:,} records")

    def close(self) -> None:
        """Wait for the pending records, up to CLOSE_S seconds."""
        self.write(None)
        self._thread.join(0 if self._has_failed else SHOWN_AFTER_S)
        if self._thread.is_alive() and not self._has_failed:
            log.info("%s: waiting up to %g s until it has taken all records", self._name, CLOSE_S)
            self._thread.join(CLOSE_S)
        if self._thread.is_alive() and not self._has_failed:
            self._warn(f"it has not taken all records within {CLOSE_S:g} s")

    def _run(self, logger: SlowLogger) -> None:
        try:
            logger.open()
            while (record := self._pending.get()) is not None and not self._has_failed:
                logger.write(record)
            logger.close()
        except (Exception, SystemExit) as error:  # of a plugin; a thread ends silently by a SystemExit
            self._warn(one_line(error))

    def _warn(self, why: str) -> None:
        log.warning("%s: %s; the run continues without it, metrics.jsonl has the same numbers", self._name, why)
        self._has_failed = True


class WandbLogger:
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
        """Begin or resume W&B's run. Raises RuntimeError if there is no API key, which it never asks for, or if only a
        file of the current folder names the server that would get it."""
        _require_own_server(Path.cwd())
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
        if isinstance(record, SamplesRecord):
            table = self._wandb.Table(["prompt", "text"], data=[[*pair] for pair in record.texts])
            self._run.log({"step": record.step, "samples": table})
        elif isinstance(record, Record | ValidationRecord):
            self._run.log({**record.row(), "tokens_seen": record.tokens_seen})

    def close(self) -> None:
        self._run.finish()


def _require_own_server(folder: Path) -> None:
    """Raise RuntimeError if W&B's settings in the folder, which may have come with a run, could send the API key to
    another server, as by a proxy. Raises OSError."""
    for file in (folder / "wandb/settings", folder / ".wandb/settings"):
        try:
            with open_regular(file) as opened:
                text = opened.read(MAX_SETTINGS_BYTES).decode()
        except FileNotFoundError:
            continue
        settings = configparser.ConfigParser(interpolation=None, strict=False)
        settings.read_string(text)
        values = {(name, value) for section in settings.values() for name, value in section.items()}
        own = {("base_url", url) for url in (WANDB_URL, os.environ.get("WANDB_BASE_URL"))}
        if others := sorted({name for name, _ in values - own} - HARMLESS_SETTINGS):
            raise RuntimeError(
                f"{file} sets {', '.join(others)}, which could send your API key to another server: if you trust it, "
                "set the same by W&B's environment variables, as WANDB_BASE_URL, and move the file away"
            )


class MlflowLogger:
    """Logs the rows of metrics.jsonl as metrics of the MLflow run that has this run's id as a tag.

    MLFLOW_TRACKING_URI is the server; without it, files in the dump folder. The configuration becomes parameters, which
    MLflow does not let a resumed run change, and the file config.toml, which has the latest values.
    """

    name = "MLflow"

    def __init__(self, section: MetricsConfig, folder: Path, about: AboutRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        import mlflow  # slow, and in the main thread: other threads do not import
        import mlflow.entities

        self._mlflow = mlflow
        self._section = section
        self._about = about
        self._uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        self._run_name = folder.absolute().name
        self._files: Path | None = None
        if not self._uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow's other store needs more packages
            self._files = (folder / MLFLOW_FOLDER).absolute()
            self._uri = self._files.as_uri()

    def open(self) -> None:
        """Find or create the experiment and the run. Raises RuntimeError if MLflow's files in the dump folder, which
        may have come with the run, would have it write elsewhere, such as into a bucket."""
        if self._files and (links := [file for file in self._files.rglob("*") if file.is_symlink()]):
            raise RuntimeError(f"{links[0]} is a link: remove it")
        self._client = client = self._mlflow.MlflowClient(self._uri)
        name = self._section.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "titanlite"
        experiment = client.get_experiment_by_name(name)
        if experiment:
            self._require_inside(experiment.artifact_location)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
        found = client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{self._about.run_id}'")
        if found:
            self._require_inside(found[0].info.artifact_uri)
            self._id = found[0].info.run_id
            client.update_run(self._id, status="RUNNING")
        else:
            self._id = client.create_run(experiment_id, run_name=self._run_name).info.run_id
            values = {key: str(value)[:MAX_TEXT] for key, value in self._about.config.items()}
            params = [self._mlflow.entities.Param(key, text) for key, text in values.items()]
            for first in range(0, len(params), MAX_PARAMS):
                client.log_batch(self._id, params=params[first : first + MAX_PARAMS])
        tags = {RUN_TAG: self._about.run_id, **self._about.facts, **dict.fromkeys(self._section.tags, "true")}
        if self._section.group:
            tags["group"] = self._section.group
        for key, text in tags.items():
            client.set_tag(self._id, key, text[:MAX_TEXT])
        client.log_text(self._id, self._about.config_toml, "config.toml")
        log.info("MLflow: run %s at %s", self._id, re.sub("//.*@", "//", self._uri))

    def _require_inside(self, place: str) -> None:
        """Raise RuntimeError if MLflow's files in the dump folder name another place for the files of the run."""
        url = urlsplit(place)
        is_file = url.scheme in ("", "file") and not url.netloc
        if self._files and not (is_file and Path(unquote(url.path)).resolve().is_relative_to(self._files.resolve())):
            raise RuntimeError(
                f"{self._files} writes to {place}, another place: move {MLFLOW_FOLDER} away, or set MLFLOW_TRACKING_URI"
            )

    def write(self, record: LogRecord) -> None:
        if isinstance(record, SamplesRecord):
            texts = "\n\n".join(prompt + text for prompt, text in record.texts)
            self._client.log_text(self._id, texts, f"samples/step-{record.step}.txt")
        elif isinstance(record, Record | ValidationRecord):
            now = int(time.time() * 1000)
            metrics = [
                self._mlflow.entities.Metric(_metric_name(key), float(value), now, record.step)
                for key, value in {**scalars(record), "tokens_seen": record.tokens_seen}.items()
            ]
            self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _metric_name(key: str) -> str:
    """The key in the characters that MLflow accepts. "/" would be a folder, beside the file of `loss`."""
    return re.sub(r"[^\w\-. ]", "_", key.replace("/", "."), flags=re.ASCII)
