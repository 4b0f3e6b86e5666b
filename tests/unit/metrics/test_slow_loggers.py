"""W&B offline and MLflow on files, the thread that calls them, and slow loggers that fail."""

import json
import logging
import re
import shutil
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from titanlite.metrics import config, slow_loggers
from titanlite.metrics.about import AboutRun
from titanlite.metrics.config import MetricsConfig, check_metrics
from titanlite.metrics.records import Record, SamplesRecord, ValidationRecord
from titanlite.metrics.scores import SetTotals
from titanlite.metrics.slow_loggers import BackgroundLogger, MlflowLogger, WandbLogger
from titanlite.runtime.logging import log

RECORD = Record(
    step=10,
    loss=2.5,
    grad_norm=1.0,
    lr=1e-3,
    num_valid=100,
    tokens_seen=640,
    tokens_per_second=1.0,
    step_time_s=1.0,
    data_time_s=0.0,
    memory_gib=1.0,
    skipped_steps=0,
    bad_rows=0,
    slowest_host="node7",
    by_source={"loss/a&b": 2.0},
)
ABOUT = AboutRun(
    {"run_id": "20261123-120000-abcd", "git_commit": "a" * 40, "hosts": "h1, h2", "torch": "2.11"},
    {"training.steps": 30, "data.shuffle": True, "job.description": "x" * 10_000},
    "[training]\nsteps = 30\n",
)
SECTION = MetricsConfig(project="p", group="g", tags=("t1", "t2"))


@pytest.fixture(autouse=True)
def _propagating_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(log, "level", logging.INFO)


class SlowLogger:
    """Notes its calls; raises `error` at the steps in `fails` ("open": at the start), waits for `gate` in each call."""

    name = "SlowLogger"

    def __init__(self, *fails: int | str, error: type[BaseException] = ConnectionError) -> None:
        self.calls: list[int | str] = []
        self.fails = fails
        self.error = error
        self.gate = threading.Event()
        self.gate.set()

    def call(self, name: int | str) -> None:
        self.gate.wait()
        if name in self.fails:
            raise self.error(f"refused\n at {name}")
        self.calls.append(name)

    def open(self) -> None:
        self.call("open")

    def write(self, record: Record | ValidationRecord) -> None:
        self.call(record.step)

    def close(self) -> None:
        self.call("close")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_records_arrive_in_order_and_close_waits_for_them(caplog: pytest.LogCaptureFixture) -> None:
    slow = SlowLogger()
    logger = BackgroundLogger(slow)
    for step in (1, 2, 3):
        logger.write(replace(RECORD, step=step))
    logger.close()
    assert slow.calls == ["open", 1, 2, 3, "close"]
    assert not warnings_of(caplog)


@pytest.mark.parametrize(
    ("fails", "error"), [("open", ConnectionError), (2, ConnectionError), ("close", ConnectionError), (2, SystemExit)]
)
def test_a_failure_is_one_warning(
    fails: int | str, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    logger = BackgroundLogger(SlowLogger(fails, error=error))
    for step in (1, 2, 3, 4):
        logger.write(replace(RECORD, step=step))
    logger.close()
    logger.write(RECORD)
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"SlowLogger: {error.__name__}: refused at {fails}; the run continues without it")


def test_a_service_that_hangs_blocks_no_write_and_is_given_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_loggers, "MAX_PENDING", 3)
    monkeypatch.setattr(slow_loggers, "CLOSE_S", 0.1)
    monkeypatch.setattr(slow_loggers, "SHOWN_AFTER_S", 0.1)
    caplog.set_level(logging.INFO, "titanlite")
    for count, why in ((2, "within 0.1 s"), (4, "the last 3 records")):
        caplog.clear()
        slow = SlowLogger()
        slow.gate.clear()
        began = time.perf_counter()
        logger = BackgroundLogger(slow)
        for step in range(count):
            logger.write(replace(RECORD, step=step))
        logger.close()
        assert time.perf_counter() - began < 5
        (warning,) = warnings_of(caplog)
        assert why in warning
        assert ("SlowLogger: waiting up to 0.1 s" in caplog.text) == (count == 2)
        slow.gate.set()


def payloads(content: bytes) -> Iterator[bytes]:
    """The records of a file of W&B, in LevelDB's log format: blocks of 32 KiB, fragments with a header of 7 bytes."""
    position, fragments = 7, b""  # after the file's own header
    while position + 7 <= len(content):
        if 2**15 - position % 2**15 < 7:
            position += 2**15 - position % 2**15
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        fragments += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a full record, or the last fragment of one
            yield fragments
            fragments = b""


def history_of(folder: Path) -> tuple[list[dict[str, Any]], list[Any]]:
    """(rows, records of the run) in W&B's offline files, in the order of the starts."""
    from wandb.proto import wandb_internal_pb2

    rows, runs = [], []
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for payload in payloads(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(payload)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
            elif record.WhichOneof("record_type") == "run":
                runs.append(record.run)
    return rows, runs


@pytest.mark.slow
def test_wandb_offline_has_rows_config_group_and_tags_under_one_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for steps in ((10, 20), (20, 30)):  # the second start resumes from step 10
        logger = BackgroundLogger(WandbLogger(SECTION, tmp_path, ABOUT))
        for step in steps:
            logger.write(replace(RECORD, step=step))
        logger.write(ValidationRecord(steps[-1], {"a": SetTotals(20.0, 10, None)}, 1.0, 1280))
        logger.write(SamplesRecord(steps[-1], (("prompt", "text"),)))
        logger.close()
        time.sleep(1)  # the seconds are in the name of its folder
    assert not warnings_of(caplog)
    rows, runs = history_of(tmp_path)
    assert [row["step"] for row in rows] == [10, 20, 20, 20, 20, 30, 30, 30]
    assert any(key.startswith("samples") for key in rows[3])
    assert rows[0]["loss"] == 2.5
    assert rows[0]["slowest_host"] == "node7"
    assert (rows[2]["validation/loss"], rows[2]["tokens_seen"]) == (2.0, 1280)
    assert {run.run_id for run in runs} == {ABOUT.run_id}
    assert (runs[0].project, runs[0].run_group, [*runs[0].tags]) == ("p", "g", ["t1", "t2"])
    settings = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert settings["training.steps"] == 30
    assert settings["git_commit"] == "a" * 40


@pytest.mark.slow
def test_wandb_without_a_key_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    logger = BackgroundLogger(WandbLogger(SECTION, tmp_path, ABOUT))
    logger.close()
    (warning,) = warnings_of(caplog)
    assert "set WANDB_API_KEY or WANDB_MODE=offline" in warning


@pytest.mark.slow
def test_mlflow_on_files_has_metrics_params_and_tags_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for steps, about in (((10, 20), ABOUT), ((20, 30), replace(ABOUT, config={"training.steps": 60}))):
        logger = BackgroundLogger(MlflowLogger(SECTION, tmp_path, about))
        for step in steps:
            logger.write(replace(RECORD, step=step, loss=float(step)))
        logger.write(ValidationRecord(steps[-1], {"a": SetTotals(20.0, 10, None)}, 1.0, 1280))
        logger.write(SamplesRecord(steps[-1], (("prompt", "text"),)))
        logger.close()
    assert not warnings_of(caplog)
    from mlflow import MlflowClient

    client = MlflowClient((tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("p")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted((point.step, point.value) for point in history) == [(10, 10), (20, 20), (20, 20), (30, 30)]
    assert run.data.metrics["validation.loss"] == 2.0
    assert run.data.metrics["loss.a_b"] == 2.0
    assert run.data.params["training.steps"] == "30"
    assert [item.path for item in client.list_artifacts(run.info.run_id, "samples")] == [
        f"samples/step-{step}.txt" for step in (20, 30)
    ]
    assert {"titanlite.run_id", "git_commit", "hosts", "torch", "group", "t1", "t2"} <= {*run.data.tags}


@pytest.mark.slow
def test_mlflow_files_of_a_run_send_nothing_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    BackgroundLogger(MlflowLogger(SECTION, folder, ABOUT)).close()
    of_experiment, of_run = sorted(folder.glob("mlruns/[!0]*/**/meta.yaml"), key=lambda file: len(file.parts))
    shutil.copytree(folder, tmp_path / "clean")
    for file, place in (
        (of_experiment, "s3://bucket/there"),
        (of_run, elsewhere.as_uri()),
        (of_run, f"{(folder / 'mlruns').as_uri()}/../../elsewhere"),
    ):
        old = file.read_text()
        file.write_text(re.sub("(artifact_.*): .*", f"\\1: {place}", old))
        assert file.read_text() != old
        caplog.clear()
        BackgroundLogger(MlflowLogger(SECTION, folder, ABOUT)).close()
        (warning,) = warnings_of(caplog)
        assert f"writes to {place}" in warning
        file.write_text(old)
    (of_run.parent / "tags" / "git_commit").unlink()
    (of_run.parent / "tags" / "git_commit").symlink_to(elsewhere)
    caplog.clear()
    BackgroundLogger(MlflowLogger(SECTION, folder, ABOUT)).close()
    (warning,) = warnings_of(caplog)
    assert "git_commit is a link: remove it" in warning
    assert not elsewhere.exists()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("base_url = http://127.0.0.1:9", "sets base_url, "),
        ("https_proxy = http://127.0.0.1:9\ninsecure_disable_ssl = true", "sets https_proxy, insecure_disable_ssl, "),
    ],
)
def test_wandb_settings_of_the_current_folder_choose_no_server(
    line: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    (tmp_path / "wandb").mkdir()
    settings = tmp_path / "wandb/settings"
    logger = WandbLogger.__new__(WandbLogger)  # W&B itself reads its settings once per process
    settings.write_text("[default]\nentity = me\nproject = mine\nbase_url = https://api.wandb.ai\n")
    with pytest.raises(AttributeError, match="_wandb"):  # the check is passed
        logger.open()
    settings.write_text(f"[default]\nentity = me\n{line}\n")
    with pytest.raises(RuntimeError, match=named):
        logger.open()


def test_a_missing_package_is_a_problem_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    names: tuple[...] = ("jsonl", "wandb", "mlflow")
    assert check_metrics(MetricsConfig(loggers=names)) == []
    monkeypatch.setattr(config, "find_spec", lambda _: None)
    (problem,) = check_metrics(MetricsConfig(loggers=names))
    assert problem.remedy == "pip install 'wandb>=0.31' and pip install 'mlflow-skinny>=3'"


def test_jsonl_is_required() -> None:
    (problem,) = check_metrics(MetricsConfig(loggers=("console",)))
    assert (problem.key, problem.remedy) == ("metrics.loggers", 'add it: ["console", "jsonl"]')
