"""MLflow, through its package `mlflow` or `mlflow-skinny`."""

import os
import re
import time
from pathlib import Path

from titanlite.metrics.about import AboutRun
from titanlite.metrics.config import MLFLOW_FOLDER, MetricsConfig
from titanlite.metrics.experts import ExpertsRecord
from titanlite.metrics.records import LogRecord
from titanlite.metrics.samples import SamplesRecord
from titanlite.runtime.logging import log

RUN_TAG = "titanlite.run_id"
MAX_PARAMS = 100
"""Of one request."""
MAX_TEXT = 500
"""Characters of a parameter or a tag that every server accepts."""


class MlflowService:
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
        if not self._uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow's other store needs more packages
            self._uri = (folder / MLFLOW_FOLDER).absolute().as_uri()

    def open(self) -> None:
        """Find or create the experiment and the run."""
        self._client = client = self._mlflow.MlflowClient(self._uri)
        name = self._section.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "titanlite"
        experiment = client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
        found = client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{self._about.run_id}'")
        if found:
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

    def write(self, record: LogRecord) -> None:
        if isinstance(record, ExpertsRecord):
            return  # the columns of Record have the largest and the smallest loads
        if isinstance(record, SamplesRecord):
            texts = "\n\n".join(prompt + text for prompt, text in record.texts)
            self._client.log_text(self._id, texts, f"samples/step-{record.step}.txt")
            return
        row = {**record.row(), "tokens_seen": record.tokens_seen}
        now = int(time.time() * 1000)
        metrics = [
            self._mlflow.entities.Metric(_metric_name(key), float(value), now, record.step)
            for key, value in row.items()
            if key != "step" and not isinstance(value, str)
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _metric_name(key: str) -> str:
    """The key in the characters that MLflow accepts. "/" would be a folder, beside the file of `loss`."""
    return re.sub(r"[^\w\-. ]", "_", key.replace("/", "."), flags=re.ASCII)
