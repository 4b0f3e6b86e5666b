"""Finding what can be gone on from, by one rank: what is set aside, what is passed over, and what is said."""

import logging
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.unit.checkpoint.making import content_of, make, write_unpublished
from titanlite.checkpoint.config import Verify
from titanlite.checkpoint.folder import published_steps, read_or_none, step_folder
from titanlite.checkpoint.manifest import MANIFEST_FILE, Manifest
from titanlite.checkpoint.start import Found, check_tensors, load, look_at, newest_whole, nothing_usable, prepare_folder
from titanlite.checkpoint.storage import METADATA_FILE, save_tensors
from titanlite.runtime.agreement import RanksError
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log


@pytest.fixture(autouse=True)
def _log_reaches_caplog(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(log, "propagate", True)
    caplog.set_level(logging.INFO, logger="titanlite")


def any_one(_: Manifest) -> bool:
    return True


def full_one(manifest: Manifest) -> bool:
    return manifest.content == "full"


def damage(folder: Path, step: int, kind: str) -> None:
    path = step_folder(folder, step)
    data = (path / METADATA_FILE).read_bytes()
    if kind == "no manifest":
        (path / MANIFEST_FILE).unlink()
    elif kind == "torn manifest":
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


SAID = {
    "no manifest": "MANIFEST.json is missing",
    "torn manifest": "MANIFEST.json cannot be read: it is torn or damaged",
    "gone": ".metadata (written by rank 3) is missing",
    "short": ".metadata (written by rank 3) has 6 bytes instead of 7",
    "long": ".metadata (written by rank 3) has 8 bytes instead of 7",
    "empty": ".metadata (written by rank 3) has 0 bytes instead of 7",
    "flipped": ".metadata (written by rank 3) does not have the content that was written: its xxh3-128 differs",
    "another's": "MANIFEST.json is that of step 5",
    "another's file": ".metadata (written by rank 3) does not have the content that was written: its xxh3-128 differs",
}
SEEN_BY: dict[str, set[Verify]] = {
    "gone": {"full", "size"},
    **{kind: {"full", "size"} for kind in ("short", "long", "empty")},
    "flipped": {"full"},
    "another's file": {"full"},
}


@pytest.mark.parametrize("verify", ["full", "size", "off"])
@pytest.mark.parametrize("kind", SAID)
def test_a_damaged_one_is_named_set_aside_and_the_next_newest_taken(
    tmp_path: Path, group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture, kind: str, verify: Verify
) -> None:
    for step in (5, 10, 15):
        make(tmp_path, step)
    damage(tmp_path, 15, kind)
    left = content_of(step_folder(tmp_path, 15))
    assert look_at(step_folder(tmp_path, 10), verify, group, any_one) is not None
    found = newest_whole(tmp_path, [5, 10, 15], verify, group, any_one)
    assert found is not None
    seen = verify in SEEN_BY.get(kind, {"full", "size", "off"})
    assert found.manifest.step == (10 if seen else 15)
    assert found.path == step_folder(tmp_path, found.manifest.step)
    if not seen:
        assert published_steps(tmp_path) == [5, 10, 15]
        assert not caplog.messages
        return
    assert published_steps(tmp_path) == [5, 10]
    (moved,) = (path for path in tmp_path.iterdir() if ".invalid-" in path.name)
    assert content_of(moved) == left
    assert caplog.messages == [f"Checkpoint step-15 is damaged: {SAID[kind]}. Set aside as {moved.name}"]


@pytest.mark.parametrize(
    ("verify", "text"), [("full", "verified in full"), ("size", "sizes verified"), ("off", "not verified")]
)
def test_how_it_is_known_is_said(tmp_path: Path, group: dist.ProcessGroup, verify: Verify, text: str) -> None:
    found = look_at(make(tmp_path, 5), verify, group, any_one)
    assert isinstance(found, Found)
    assert found.verified.startswith(f"{text} (1 files, 0.0 MiB, 0.")


def test_the_usable_ones_alone_are_taken_and_the_others_stay(tmp_path: Path, group: dist.ProcessGroup) -> None:
    make(tmp_path, 5)
    make(tmp_path, 10, content="model")
    before = content_of(tmp_path)
    found = newest_whole(tmp_path, [5, 10], "full", group, full_one)
    assert found is not None
    assert found.manifest.step == 5
    assert content_of(tmp_path) == before


def test_all_are_set_aside_where_none_is_whole(tmp_path: Path, group: dist.ProcessGroup) -> None:
    for step in (5, 10):
        make(tmp_path, step)
    for step in (5, 10):
        damage(tmp_path, step, "no manifest")
    assert newest_whole(tmp_path, [5, 10], "full", group, any_one) is None
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name.split(".")[0] for name in names] == ["step-10", "step-5"]
    assert all(".invalid-" in name for name in names)
    assert prepare_folder(tmp_path, group) == ([], True)
    (tmp_path / "notes").mkdir()
    error = str(nothing_usable(tmp_path))
    assert f"no checkpoint in {tmp_path} can be used, and there were some: {names[0]}, {names[1]}. To start" in error
    assert "--job.dump_folder" in error


def test_a_newer_format_stops_the_run_and_stays(tmp_path: Path, group: dist.ProcessGroup) -> None:
    make(tmp_path, 5)
    make(tmp_path, 10, format=99)
    before = content_of(tmp_path)
    with pytest.raises(RanksError, match=r"step-10: its format is 99.*use a newer titanlite"):
        newest_whole(tmp_path, [5, 10], "full", group, any_one)
    assert content_of(tmp_path) == before


def test_what_cannot_be_read_now_stops_the_run_and_stays(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, 5)
    before = content_of(tmp_path)

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(RanksError, match=r"MANIFEST\.json: Permission denied"):
            newest_whole(tmp_path, [5], "full", group, any_one)
    assert content_of(tmp_path) == before


def test_what_the_settings_refuse_is_not_set_aside(tmp_path: Path, group: dist.ProcessGroup) -> None:
    make(tmp_path, 5)
    before = content_of(tmp_path)

    def refuse(_: Manifest) -> bool:
        raise UserError("other settings")

    with pytest.raises(UserError, match="other settings"):
        newest_whole(tmp_path, [5], "full", group, refuse)
    assert content_of(tmp_path) == before


def test_a_folder_is_prepared(tmp_path: Path, group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture) -> None:
    assert prepare_folder(tmp_path / "none", group) == ([], False)
    write_unpublished(tmp_path, 10)
    assert prepare_folder(tmp_path, group) == ([], False)
    assert caplog.messages == ["Removed what an interrupted save or deletion had left: .step-10.writing"]
    make(tmp_path, 5)
    assert prepare_folder(tmp_path, group) == ([5], True)


def test_a_manifest_or_none(tmp_path: Path) -> None:
    assert read_or_none(tmp_path / "none") is None
    make(tmp_path, 10, format=99)
    assert read_or_none(step_folder(tmp_path, 10)) is None
    path = make(tmp_path, 5)
    manifest = read_or_none(path)
    assert manifest is not None
    assert manifest.step == 5
    damage(tmp_path, 5, "torn manifest")
    assert read_or_none(path) is None


def tensors_at(folder: Path, group: dist.ProcessGroup) -> Found:
    """A checkpoint with tensors of which this manifest, and no verification, knows nothing."""
    path = make(folder, 5)
    (path / METADATA_FILE).unlink()
    tensors = {"model/a": torch.arange(6.0).reshape(2, 3), "model/b": torch.ones(4)}
    save_tensors(path, tensors, tensors, group)
    found = look_at(path, "off", group, any_one)
    assert isinstance(found, Found)
    return found


def test_tensors_are_checked_by_name_and_shape_before_they_are_loaded(tmp_path: Path, group: dist.ProcessGroup) -> None:
    found = tensors_at(tmp_path, group)
    wanted = {"model/a": torch.zeros(2, 3)}
    check_tensors(found.path, wanted, group)
    load(found, wanted, group)
    assert wanted["model/a"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    with pytest.raises(UserError, match="has no model/c: it is of another model"):
        check_tensors(found.path, {"model/c": torch.zeros(1)}, group)
    with pytest.raises(UserError, match=r"has model/b of shape \(4,\), and this model needs \(5,\)"):
        check_tensors(found.path, {"model/b": torch.zeros(5)}, group)


def test_what_cannot_be_loaded_is_said_with_the_folder(tmp_path: Path, group: dist.ProcessGroup) -> None:
    found = tensors_at(tmp_path, group)
    with pytest.raises(UserError, match=r"step-5 cannot be loaded: rank 0: .*model/c"):
        load(found, {"model/c": torch.zeros(1)}, group)
    (found.path / "__0_0.distcp").unlink()
    with pytest.raises(UserError, match=r"step-5 cannot be loaded: rank 0: .*No such file"):
        load(found, {"model/a": torch.zeros(2, 3)}, group)
