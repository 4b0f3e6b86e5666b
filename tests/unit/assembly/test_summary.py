"""The next commands that a run suggests at its end: they fit the run, and can be pasted where it was started."""

import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titanlite.assembly.summary import next_commands, summarize
from titanlite.checkpoint.config import CheckpointConfig
from titanlite.config.schema import JobConfig, TrainingConfig
from titanlite.data.config import DataConfig
from titanlite.data.sources.config import SourceConfig
from titanlite.parallel.mesh import ParallelismConfig

RECORD: Any = SimpleNamespace(step=1000, tokens_seen=8, loss=1.0, skipped_steps=0, too_long={})
TRAINING = TrainingConfig(local_batch_size=4, global_batch_size=8)
SAVING = JobConfig(training=TRAINING, checkpoint=CheckpointConfig(enable=True))


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process, of an environment in the current folder that is not on PATH; with a tokenizer in "outputs"."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "TITANLITE_RUN_TRAIN", "NGPU", "DEVICE", "PYTHON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "tokenizer").mkdir(parents=True)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "titanlite"):
        (tmp_path / ".venv" / "bin" / name).touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is active."""
    monkeypatch.setenv("PATH", str(tmp_path / ".venv" / "bin"))


def commands(config: JobConfig, record: Any = RECORD) -> dict[str, str]:
    """Purpose -> command."""
    return dict(next_commands(config, record))


@pytest.mark.usefixtures("on_path")
def test_a_run_with_checkpoints_can_generate_and_train_longer() -> None:
    assert commands(SAVING) == {
        "generate text": 'titanlite generate outputs --prompt "def __init__(self"',
        "train longer": "titanlite train outputs/config.toml --training.steps 4000",
        "on two processes": "python -P -m titanlite.torchrun --standalone --nproc-per-node 2 -m titanlite.train "
        "outputs/config.toml --job.dump_folder outputs-2",
        "on your own text": "set data.sources in a TOML file; all keys: titanlite train --help",
        "see its curves": "titanlite report outputs",
    }


@pytest.mark.usefixtures("on_path")
def test_only_a_run_on_the_python_library_suggests_own_text() -> None:
    own = DataConfig(sources=(SourceConfig("text", "corpus.txt"),))
    assert set(commands(SAVING)) - set(commands(replace(SAVING, data=own))) == {"on your own text"}


@pytest.mark.usefixtures("on_path")
def test_a_run_on_conversations_suggests_to_talk_with_it() -> None:
    sources = (SourceConfig("text", "corpus.txt"), SourceConfig("chat", "chat.jsonl"))
    found = commands(replace(SAVING, data=DataConfig(sources=sources)))
    assert found["talk with it"] == "titanlite generate outputs --chat"
    assert "generate text" not in found


@pytest.mark.usefixtures("on_path")
def test_a_run_without_checkpoints_can_only_start_again(caplog: pytest.LogCaptureFixture) -> None:
    found = commands(JobConfig(training=TRAINING))
    assert "generate text" not in found
    assert "train longer" not in found
    assert found["train and save"] == "titanlite train outputs/config.toml --checkpoint.enable"
    for config, says in ((JobConfig(training=TRAINING), True), (SAVING, False)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "titanlite"):
            summarize(config, RECORD, 1000, 1.0)
        assert ("The weights were not saved" in caplog.text) == says
        assert "Next: " in caplog.text


def test_without_a_tokenizer_no_generation(tmp_path: Path) -> None:
    (tmp_path / "outputs" / "tokenizer").rmdir()
    assert "generate text" not in commands(SAVING)


def test_what_cannot_continue_is_not_suggested() -> None:
    exhausted: Any = SimpleNamespace(step=999)
    found = commands(SAVING, exhausted)
    assert "generate text" in found
    assert "train longer" not in found


def test_programs_that_are_not_on_path_are_called_by_their_path(tmp_path: Path, monkeypatch: Any) -> None:
    assert commands(SAVING)["see its curves"] == ".venv/bin/titanlite report outputs"
    assert commands(SAVING)["on two processes"].startswith(".venv/bin/python -P -m titanlite.torchrun ")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert commands(SAVING)["see its curves"] == f"{tmp_path}/.venv/bin/titanlite report outputs"
    (tmp_path / ".venv" / "bin" / "titanlite").unlink()
    assert commands(SAVING)["see its curves"] == f"{tmp_path}/.venv/bin/python -P -m titanlite report outputs"


@pytest.mark.usefixtures("on_path")
def test_run_train_is_suggested_to_a_run_that_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITANLITE_RUN_TRAIN", "../my checkout/run_train.sh")
    found = commands(SAVING)
    assert found["train longer"] == "'../my checkout/run_train.sh' outputs/config.toml --training.steps 4000"
    assert found["on two processes"].startswith("NGPU=2 '../my checkout/run_train.sh' outputs/config.toml ")
    # run_train.sh has extended PATH for the run only
    assert found["see its curves"] == ".venv/bin/titanlite report outputs"
    monkeypatch.setenv("DEVICE", "cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert commands(SAVING)["train longer"].startswith("DEVICE=cpu NGPU=2 '../my checkout/run_train.sh' ")


@pytest.mark.usefixtures("on_path")
def test_runs_on_several_processes_and_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = commands(SAVING)
    assert found["train longer"].startswith("python -P -m titanlite.torchrun --standalone --nproc-per-node 2 -m ")
    assert "on two processes" not in found
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "train longer" not in commands(SAVING)


def test_two_processes_are_suggested_if_the_configuration_fits_them(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = replace(SAVING, training=TrainingConfig(local_batch_size=3, global_batch_size=3))
    assert commands(odd)["on two processes"].endswith("outputs-2")
    stored = replace(SAVING, checkpoint=replace(SAVING.checkpoint, folder="s3://bucket/run/"))
    assert commands(stored)["on two processes"].endswith("outputs-2 --checkpoint.folder s3://bucket/run-2")
    one_stream = replace(SAVING, data=replace(SAVING.data, num_streams=1))
    fixed = replace(SAVING, parallelism=ParallelismConfig(dp_shard=1))
    for config in (one_stream, fixed):
        assert "on two processes" not in commands(config)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert "on two processes" not in commands(SAVING)
