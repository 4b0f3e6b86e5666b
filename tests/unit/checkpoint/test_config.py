"""The rules of [checkpoint], and the settings that a run keeps from its first start."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint.making import make
from titanlite.checkpoint.config import CheckpointConfig, check_checkpoint
from titanlite.checkpoint.folder import quarantine, step_folder
from titanlite.checkpoint.manifest import MANIFEST_FILE, Branch
from titanlite.checkpoint.preflight import check_start, earlier_manifest
from titanlite.config.load import config_from_values, keep_earlier, load_config
from titanlite.config.schema import JobConfig

PINNED = {"async_mode": "async_with_pinned_mem"}


@pytest.mark.parametrize(
    ("device_type", "values"),
    [
        *((device_type, values) for device_type in ("cpu", "cuda") for values in ({}, {"async_mode": "async"})),
        ("cuda", PINNED),
        ("cpu", {"interval": 1, "keep_latest_k": 0, "keep_every": 0, "load_step": 0}),
        ("cpu", {"load_step": 10**9}),
        *(("cpu", {"folder": folder}) for folder in ("a/b", "..a", "a..b/.c")),
    ],
)
def test_valid_settings(device_type: str, values: dict[str, Any]) -> None:
    assert check_checkpoint(replace(CheckpointConfig(enable=True), **values), device_type) == []


@pytest.mark.parametrize(
    ("values", "rule", "remedy"),
    [
        *(
            ({"folder": folder}, "a folder inside job.dump_folder", "a plain name")
            for folder in ("", ".", "./.", "/abs", "..", "../up", "a/../..", "a/..")
        ),
        (PINNED, "needs an accelerator", 'checkpoint.async_mode = "async"'),
        ({"load_step": 5, "enable": False}, "only with checkpoint.enable = true", ""),
    ],
)
def test_each_problem_has_key_value_rule_and_remedy(values: dict[str, Any], rule: str, remedy: str) -> None:
    for enable in (True, False):
        (problem,) = check_checkpoint(replace(CheckpointConfig(), **{"enable": enable} | values), "cpu")
        ((name, value), *_) = values.items()
        assert (problem.key, problem.value) == (f"checkpoint.{name}", value)
        assert problem.rule.startswith(rule)
        assert remedy in problem.remedy


def test_load_step_needs_an_existing_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    back = CheckpointConfig(enable=True, load_step=7)
    (problem,) = check_start(back, str(tmp_path))
    assert problem.rule == f"the step of a checkpoint in {folder}, which has: no checkpoint"
    make(folder, 7)
    make(folder, 9)
    assert check_start(back, str(tmp_path)) == []
    (problem,) = check_start(replace(back, load_step=8), str(tmp_path))
    assert problem.rule.endswith("which has: 7, 9")
    make(folder, 11, lineage=(Branch("a", 0), Branch("b", 8)))
    assert check_start(replace(back, load_step=8), str(tmp_path)) == []  # the run has gone back to step 8 already


def test_initial_load_path_needs_an_existing_checkpoint(tmp_path: Path) -> None:
    missing = CheckpointConfig(enable=True, initial_load_path=str(tmp_path / "other"))
    (problem,) = check_start(missing, str(tmp_path))
    assert (problem.key, problem.value) == ("checkpoint.initial_load_path", str(tmp_path / "other"))
    make(tmp_path / "other", 5)
    for path in (tmp_path / "other", tmp_path / "other/step-5"):
        assert check_start(replace(missing, initial_load_path=str(path)), str(tmp_path)) == []
    make(tmp_path / "dump" / "checkpoint", 5)
    (problem,) = check_start(replace(missing, initial_load_path=str(tmp_path / "dump")), str(tmp_path))
    assert problem.remedy == f'this is a dump folder: write "{tmp_path}/dump/checkpoint"'
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").touch()
    (problem,) = check_start(replace(missing, initial_load_path=str(tmp_path / "folder")), str(tmp_path))
    assert problem.remedy.endswith(f'write "hf:{tmp_path}/folder"')
    (problem,) = check_start(replace(missing, initial_load_path=str(tmp_path / "other/step-7")), str(tmp_path))
    assert problem.remedy == f"{tmp_path}/other has the steps 5: name one of them"
    make(tmp_path / "checkpoint", 3)
    assert check_start(replace(missing, initial_load_path="gone"), str(tmp_path)) == []


def test_a_run_does_not_start_from_a_checkpoint_of_its_own_folder(tmp_path: Path) -> None:
    """Else it would resume from its latest checkpoint and ignore the path: a branch without a folder of its own."""
    make(tmp_path / "trunk/checkpoint", 5)
    make(tmp_path / "trunk/checkpoint", 9)
    make(tmp_path / "checkpoint", 7)
    for path in (tmp_path / "trunk/checkpoint/step-5", tmp_path / "trunk/checkpoint"):
        branch = CheckpointConfig(enable=True, initial_load_path=str(path), initial_load_model_only=False)
        (problem,) = check_start(branch, str(tmp_path / "trunk"))
        assert problem.key == "checkpoint.initial_load_path"
        assert problem.rule.endswith("is the folder of this run, which resumes from step 9")
        assert "--job.dump_folder ANOTHER" in problem.remedy
        assert check_start(branch, str(tmp_path / "branch")) == []
        assert check_start(branch, str(tmp_path)) == []  # a branch in the parent folder of the trunk


def saved_config(batch: int, streams: int) -> dict[str, Any]:
    return {"training": {"global_batch_size": batch}, "data": {"num_streams": streams, "document_mask": False}}


def job(tmp_path: Path, **checkpoint: Any) -> JobConfig:
    config = JobConfig()
    return replace(
        config,
        job=replace(config.job, dump_folder=str(tmp_path)),
        checkpoint=replace(CheckpointConfig(enable=True), **checkpoint),
    )


def kept_settings(config: JobConfig) -> tuple[int, int]:
    found = keep_earlier(config)
    assert replace(found, training=config.training, data=config.data, loss=config.loss) == config
    unchanged = (
        replace(found.training, global_batch_size=-1),
        replace(found.data, num_streams=-1, document_mask="auto", add_bos="auto", stream_version=-1),
    )
    assert unchanged == (replace(config.training, global_batch_size=-1), replace(config.data, num_streams=-1))
    return found.training.global_batch_size, found.data.num_streams


def test_resolved_settings_are_kept_from_the_latest_checkpoint(tmp_path: Path) -> None:
    assert kept_settings(job(tmp_path)) == (-1, -1)
    make(tmp_path / "checkpoint", 5, config=saved_config(16, 8))
    assert kept_settings(job(tmp_path)) == (16, 8)
    make(tmp_path / "checkpoint", 10, config=saved_config(32, 8))
    assert kept_settings(job(tmp_path)) == (32, 8)


def test_the_document_mask_of_the_checkpoint_is_kept(tmp_path: Path) -> None:
    """Sources may have been added since."""
    assert keep_earlier(job(tmp_path)).data.document_mask == "auto"
    for step, mask in enumerate((True, False), 1):
        earlier = saved_config(16, 8)
        earlier["data"] |= {"document_mask": mask}
        make(tmp_path / "checkpoint", step, config=earlier)
        assert keep_earlier(job(tmp_path)).data.document_mask is mask


@pytest.mark.parametrize(
    ("stored", "kept"), [("bfloat16", "bfloat16"), ("float32", "float32"), ("auto", "float32"), (None, "float32")]
)
def test_the_orthogonalization_of_the_checkpoint_is_kept(stored: str | None, kept: str, tmp_path: Path) -> None:
    """Versions that stored "auto" had that of the parameters, also on GPUs."""
    config = job(tmp_path)
    muon = replace(config, optimizer=replace(config.optimizer, name="Muon"))
    assert keep_earlier(muon).optimizer.newton_schulz_dtype == "auto"
    optimizer = {} if stored is None else {"newton_schulz_dtype": stored}
    make(tmp_path / "checkpoint", 1, config=saved_config(16, 8) | {"optimizer": optimizer})
    assert keep_earlier(muon).optimizer.newton_schulz_dtype == kept
    assert keep_earlier(config).optimizer == config.optimizer
    given = replace(muon, optimizer=replace(muon.optimizer, newton_schulz_dtype="float64"))
    assert keep_earlier(given).optimizer.newton_schulz_dtype == "float64"


def test_the_stream_version_of_the_checkpoint_is_kept(tmp_path: Path) -> None:
    """Checkpoints without the key are of runs that began with version 2."""
    assert keep_earlier(job(tmp_path)).data.stream_version == -1
    for step, stored in enumerate(({}, {"stream_version": 2}, {"stream_version": 3}), 1):
        earlier = saved_config(16, 8)
        earlier["data"] |= stored
        make(tmp_path / "checkpoint", step, config=earlier)
        assert keep_earlier(job(tmp_path)).data.stream_version == stored.get("stream_version", 2)
    given = job(tmp_path)
    given = replace(given, data=replace(given.data, stream_version=2))
    assert keep_earlier(given).data.stream_version == 2  # and refused, as it differs from the checkpoint's
    assert config_from_values(earlier | {"model": {}}).data.stream_version == 3
    assert config_from_values(saved_config(16, 8) | {"model": {}}).data.stream_version == 2


def test_given_settings_override_the_checkpoint(tmp_path: Path) -> None:
    make(tmp_path / "checkpoint", 5, config=saved_config(16, 8))
    config = job(tmp_path)
    assert kept_settings(replace(config, training=replace(config.training, global_batch_size=4))) == (4, 8)
    assert kept_settings(replace(config, data=replace(config.data, num_streams=2))) == (16, 2)


def test_settings_are_not_read_from_invalid_or_superseded_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    for step in (5, 10, 15, 20):
        make(folder, step, config=saved_config(step, step))
    (step_folder(folder, 20) / MANIFEST_FILE).unlink()
    (step_folder(folder, 15) / MANIFEST_FILE).write_text("{")
    make(folder, 25, config=saved_config(25, 25), format=99)
    make(folder, 30, config=saved_config(30, 30))
    quarantine(folder, 30, "superseded-a1")
    assert kept_settings(job(tmp_path)) == (10, 10)


def test_settings_are_read_from_the_checkpoint_of_load_step(tmp_path: Path) -> None:
    for step in (0, 5, 10):
        make(tmp_path / "checkpoint", step, config=saved_config(step + 1, 3))
    assert kept_settings(job(tmp_path, load_step=5)) == (6, 3)
    assert kept_settings(job(tmp_path, load_step=0)) == (1, 3)
    assert kept_settings(job(tmp_path, load_step=7)) == (11, 3)  # deleted since the run went back to it


def test_settings_are_read_from_initial_load_path_if_all_state_is_loaded(tmp_path: Path) -> None:
    other = tmp_path / "other"
    make(other, 5, config=saved_config(16, 8))
    make(other, 9, config=saved_config(17, 8))
    for path, batch in ((other, 17), (other / "step-5", 16)):
        assert kept_settings(job(tmp_path, initial_load_path=str(path))) == (-1, -1)
        full = {"initial_load_path": str(path), "initial_load_model_only": False}
        assert kept_settings(job(tmp_path, **full)) == (batch, 8)
        assert kept_settings(job(tmp_path, **full, enable=False)) == (batch, 8)
    make(tmp_path / "checkpoint", 1, config=saved_config(2, 2))
    assert kept_settings(job(tmp_path, **full)) == (2, 2)
    assert kept_settings(job(tmp_path, enable=False)) == (-1, -1)


def test_settings_are_read_from_checkpoint_folder(tmp_path: Path) -> None:
    make(tmp_path / "a" / "b", 5, config=saved_config(16, 8))
    assert kept_settings(job(tmp_path, folder="a/b")) == (16, 8)
    assert earlier_manifest(CheckpointConfig(enable=True), str(tmp_path / "none")) is None


def test_a_start_on_more_processes_keeps_batch_and_streams(tmp_path: Path) -> None:
    argv = [f"--job.dump_folder={tmp_path}", "--checkpoint.enable", "true", "--training.local_batch_size", "2"]
    first = load_config(argv, world_size=2, device_type="cpu")
    assert (first.training.global_batch_size, first.data.num_streams) == (4, 4)
    make(tmp_path / "checkpoint", 5, config=asdict(first))
    for world_size in (1, 2):
        again = load_config(argv, world_size=world_size, device_type="cpu")
        assert (again.training.global_batch_size, again.data.num_streams) == (4, 4)
    larger = load_config([*argv, "--training.global_batch_size", "8"], world_size=1, device_type="cpu")
    assert (larger.training.global_batch_size, larger.data.num_streams) == (8, 4)
