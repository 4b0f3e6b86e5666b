"""Finding a checkpoint to resume from, on one rank: quarantined and skipped checkpoints, and messages."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.unit.checkpoint.making import content_of, make, write_unpublished
from titanlite.checkpoint.folder import published_steps, read_or_none, step_folder
from titanlite.checkpoint.manifest import MANIFEST_FILE, METADATA_FILE, Manifest, read_manifest
from titanlite.checkpoint.start import check_tensors, load
from titanlite.checkpoint.storage import read_shapes, save_tensors
from titanlite.checkpoint.verification import Found, latest_valid, prepare_folder, verify_checkpoint
from titanlite.ranks.agreement import RanksError
from titanlite.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("propagating_log")


@pytest.mark.parametrize("kind", ["link", "pipe", "file"])
def test_what_is_not_a_folder_is_quarantined(
    tmp_path: Path, group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    make(tmp_path, 10)
    path = step_folder(tmp_path, 12)
    {"link": lambda: path.symlink_to("nowhere"), "pipe": lambda: os.mkfifo(path), "file": path.touch}[kind]()
    assert prepare_folder(tmp_path, group) == ([10], True)
    assert "Checkpoint step-12 is corrupted: it is not a folder but a link or another kind of file" in caplog.text
    assert sorted(name.partition("-2")[0] for name in os.listdir(tmp_path)) == ["step-10", "step-12.invalid"]
    make(tmp_path, 12)


def test_a_run_with_only_a_lost_link_does_not_begin_at_step_0(tmp_path: Path, group: dist.ProcessGroup) -> None:
    step_folder(tmp_path, 12).symlink_to("nowhere")
    assert prepare_folder(tmp_path, group) == ([], True)
    with pytest.raises(UserError, match=r"cannot resume from any checkpoint in .*: step-12\.invalid-"):
        latest_valid(tmp_path, [], group, any_one)


def any_one(_: Manifest) -> bool:
    return True


def full_one(manifest: Manifest) -> bool:
    return manifest.content == "full"


def damage(folder: Path, step: int, kind: str) -> None:
    path = step_folder(folder, step)
    data = (path / METADATA_FILE).read_bytes()
    if kind == "no manifest":
        (path / MANIFEST_FILE).unlink()
    elif kind == "truncated manifest":
        os.truncate(path / MANIFEST_FILE, 100)
    elif kind == "gone":
        (path / METADATA_FILE).unlink()
    elif kind == "short":
        (path / METADATA_FILE).write_bytes(data[:-1])
    elif kind == "long":
        (path / METADATA_FILE).write_bytes(data + b"\0")
    elif kind == "empty":
        (path / METADATA_FILE).write_bytes(b"")
    elif kind == "flipped":
        (path / METADATA_FILE).write_bytes(bytes([data[0] ^ 1]) + data[1:])
    elif kind == "another's":
        for name in (MANIFEST_FILE, METADATA_FILE):
            (path / name).write_bytes((step_folder(folder, 5) / name).read_bytes())
    elif kind == "another's file":
        (path / METADATA_FILE).write_bytes((step_folder(folder, 5) / METADATA_FILE).read_bytes().ljust(len(data)))


MESSAGES = {
    "no manifest": "MANIFEST.json is missing",
    "truncated manifest": (
        "MANIFEST.json cannot be read: it is not JSON: Expecting ',' delimiter: line 9 column 3 (char 100)"
    ),
    "gone": ".metadata (written by rank 3) is missing",
    "short": ".metadata (written by rank 3) has 6 bytes instead of 7",
    "long": ".metadata (written by rank 3) has 8 bytes instead of 7",
    "empty": ".metadata (written by rank 3) has 0 bytes instead of 7",
    "flipped": ".metadata (written by rank 3) has changed since it was written: its xxh3-128 differs",
    "another's": "MANIFEST.json belongs to step 5",
    "another's file": ".metadata (written by rank 3) has changed since it was written: its xxh3-128 differs",
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_corrupted_checkpoint_is_quarantined_and_the_previous_one_used(
    tmp_path: Path, group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    for step in (5, 10, 15):
        make(tmp_path, step)
    damage(tmp_path, 15, kind)
    left = content_of(step_folder(tmp_path, 15))
    assert verify_checkpoint(step_folder(tmp_path, 10), group, any_one) is not None
    found = latest_valid(tmp_path, [5, 10, 15], group, any_one)
    assert found.manifest.step == 10
    assert found.path == step_folder(tmp_path, 10)
    assert published_steps(tmp_path) == [5, 10]
    (moved,) = (path for path in tmp_path.iterdir() if ".invalid-" in path.name)
    assert content_of(moved) == left
    assert caplog.messages == [f"Checkpoint step-15 is corrupted: {MESSAGES[kind]}. Quarantined as {moved.name}"]


def test_found_states_how_it_was_verified(tmp_path: Path, group: dist.ProcessGroup) -> None:
    found = verify_checkpoint(make(tmp_path, 5), group, any_one)
    assert isinstance(found, Found)
    assert found.verified.startswith("verified in full (1 file, 0.0 MiB, 0.")


def test_unusable_checkpoints_are_skipped_and_not_renamed(tmp_path: Path, group: dist.ProcessGroup) -> None:
    make(tmp_path, 5)
    make(tmp_path, 10, content="model")
    before = content_of(tmp_path)
    found = latest_valid(tmp_path, [5, 10], group, full_one)
    assert found.manifest.step == 5
    assert content_of(tmp_path) == before


@pytest.mark.parametrize(("version", "remedy"), [(99, "a newer titanlite"), (2, "the titanlite that wrote it;")])
def test_another_format_raises_and_is_not_renamed(
    version: int, remedy: str, tmp_path: Path, group: dist.ProcessGroup
) -> None:
    make(tmp_path, 5)
    make(tmp_path, 10, format=version)
    before = content_of(tmp_path)
    with pytest.raises(RanksError, match=rf"step-10: its format version is {version}.*use {remedy}"):
        latest_valid(tmp_path, [5, 10], group, any_one)
    assert content_of(tmp_path) == before


def test_an_unreadable_checkpoint_raises_and_is_not_renamed(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, 5)
    before = content_of(tmp_path)

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("titanlite.checkpoint.manifest.read_regular", refuse)
        with pytest.raises(RanksError, match=r"MANIFEST\.json: Permission denied"):
            latest_valid(tmp_path, [5], group, any_one)
    assert content_of(tmp_path) == before


def test_a_checkpoint_refused_by_settings_is_not_renamed(tmp_path: Path, group: dist.ProcessGroup) -> None:
    make(tmp_path, 5)
    before = content_of(tmp_path)

    def refuse(_: Manifest) -> bool:
        raise UserError("other settings")

    with pytest.raises(UserError, match="other settings"):
        latest_valid(tmp_path, [5], group, refuse)
    assert content_of(tmp_path) == before


def test_prepare_folder_removes_leftovers(
    tmp_path: Path, group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    assert prepare_folder(tmp_path / "none", group) == ([], False)
    write_unpublished(tmp_path, 10)
    assert prepare_folder(tmp_path, group) == ([], False)
    assert caplog.messages == ["Removed leftovers of an interrupted save or deletion: .step-10.writing"]
    make(tmp_path, 5)
    assert prepare_folder(tmp_path, group) == ([5], True)


def test_read_or_none(tmp_path: Path) -> None:
    assert read_or_none(tmp_path / "none") is None
    make(tmp_path, 10, format=99)
    assert read_or_none(step_folder(tmp_path, 10)) is None
    path = make(tmp_path, 5)
    manifest = read_or_none(path)
    assert manifest is not None
    assert manifest.step == 5
    damage(tmp_path, 5, "truncated manifest")
    assert read_or_none(path) is None


def tensors_at(folder: Path, group: dist.ProcessGroup) -> Found:
    """Return an unverified checkpoint with tensor files that its manifest does not list."""
    path = make(folder, 5)
    (path / METADATA_FILE).unlink()
    tensors = {"model/a": torch.arange(6.0).reshape(2, 3), "model/b": torch.ones(4)}
    save_tensors(path, tensors, tensors, group)
    return Found(path, read_manifest(path), "not verified")


def test_check_tensors_compares_names_and_shapes(tmp_path: Path, group: dist.ProcessGroup) -> None:
    found = tensors_at(tmp_path, group)
    wanted, saved = {"model/a": torch.zeros(2, 3)}, read_shapes(found.path)
    check_tensors(found.path, saved, wanted, group)
    load(found.path, wanted, group)
    assert wanted["model/a"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    with pytest.raises(UserError, match="has no model/c: it belongs to another model"):
        check_tensors(found.path, saved, {"model/c": torch.zeros(1)}, group)
    with pytest.raises(UserError, match=r"has model/b of shape \(4,\), but this model needs \(5,\)"):
        check_tensors(found.path, saved, {"model/b": torch.zeros(5)}, group)


def test_a_failed_load_names_the_folder(tmp_path: Path, group: dist.ProcessGroup) -> None:
    found = tensors_at(tmp_path, group)
    with pytest.raises(UserError, match=r"step-5 cannot be loaded: rank 0: .*model/c"):
        load(found.path, {"model/c": torch.zeros(1)}, group)
    (found.path / "__0_0.distcp").unlink()
    with pytest.raises(UserError, match=r"step-5 cannot be loaded: rank 0: .*No such file"):
        load(found.path, {"model/a": torch.zeros(2, 3)}, group)
