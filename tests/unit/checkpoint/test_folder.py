"""The checkpoint folder: names, publishing, quarantine, retention and interruptions."""

import os
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint.making import content_of, kills, make, write_unpublished
from titanlite.checkpoint.folder import (
    checkpoint_names,
    clear_leftovers,
    complete_manifest,
    delete,
    invalid_kind,
    misplaced_steps,
    publish,
    published_steps,
    quarantine,
    retain,
    step_folder,
    supersede_after,
)
from titanlite.checkpoint.manifest import (
    FORMAT_VERSION,
    GRID_FORMAT_VERSION,
    MANIFEST_FILE,
    METADATA_FILE,
    Branch,
    InvalidCheckpointError,
    UnknownFormatError,
)

FOREIGN_FOLDERS = [
    *("step-007", "step-7x", "my-step-50-gold", "step--1", "step-+7", "step-", "step-7 ", "step-7\n", "step-7.5"),
    *("Step-7", "step-1_0", "step-\u0667", "step-00", ".step-007.writing", ".step-7.writing.old", "step-7.writing"),
    *(".step-7.invalid", ".step-7", "step_7", "xstep-7", ".step-7.deleting-2", "tmp"),
]


def add_foreign(folder: Path) -> None:
    """Add complete checkpoints under foreign names, and files and symlinks under checkpoint names."""
    for name in FOREIGN_FOLDERS:
        make(folder, 7).rename(folder / name)
    (folder / "step-70").write_text("a file")
    (folder / ".step-70.writing").write_text("a file")
    elsewhere = folder.parent / "elsewhere"
    make(elsewhere, 71)
    (folder / "step-71").symlink_to(elsewhere / "step-71")
    (folder / ".step-71.writing").symlink_to(elsewhere / "step-71")
    (folder / "step-72").symlink_to(folder / "nowhere")


def test_foreign_names_files_and_links_are_never_touched(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    add_foreign(folder)
    foreign, elsewhere = content_of(folder), content_of(tmp_path / "elsewhere")
    assert published_steps(folder) == []
    assert misplaced_steps(folder) == [70, 71, 72]
    assert checkpoint_names(folder)  # a link may be that of a checkpoint that is lost
    for step in (0, 5, 8, 100):
        make(folder, step)
    assert published_steps(folder) == [0, 5, 8, 100]
    assert clear_leftovers(folder) == []
    assert supersede_after(folder, 8) == [100]
    assert retain(folder, keep_latest_k=1, keep_every=0, keep=()) == [0, 5]
    quarantine(folder, 8, "invalid-now")
    assert published_steps(folder) == []
    now = content_of(folder)
    assert {name: now.get(name) for name in foreign} == foreign
    ours = {name.split("/")[0] for name in now.keys() - foreign.keys()}
    assert ours == {"step-8.invalid-now", "step-100.superseded-a1"}
    assert content_of(tmp_path / "elsewhere") == elsewhere


def test_a_missing_folder_counts_as_empty(tmp_path: Path) -> None:
    folder = tmp_path / "none"
    assert (published_steps(folder), checkpoint_names(folder), clear_leftovers(folder)) == ([], [], [])
    assert not folder.exists()


def test_steps_are_sorted_as_numbers(tmp_path: Path) -> None:
    for step in (10, 9, 100, 0):
        make(tmp_path, step)
    assert published_steps(tmp_path) == [0, 9, 10, 100]


@pytest.mark.parametrize("name", ["step-7", "step-7.invalid-x", "step-7.superseded-a1", "step-7.superseded-a1-2"])
def test_checkpoint_names_has_published_and_renamed_checkpoints(tmp_path: Path, name: str) -> None:
    make(tmp_path, 7).rename(tmp_path / name)
    (tmp_path / "and-more").mkdir()
    assert checkpoint_names(tmp_path) == [name]


@pytest.mark.parametrize("name", [".step-7.writing", ".step-7.deleting", "step-7.gold", "step-07.invalid-x"])
def test_checkpoint_names_lacks_other_names(tmp_path: Path, name: str) -> None:
    make(tmp_path, 7).rename(tmp_path / name)
    assert checkpoint_names(tmp_path) == []


@pytest.mark.parametrize("kind", ["checkpoint", "empty folder", "file", "link", "dangling link"])
def test_publish_never_overwrites(tmp_path: Path, kind: str) -> None:
    target = step_folder(tmp_path, 7)
    if kind == "checkpoint":
        make(tmp_path, 7)
    elif kind == "empty folder":
        target.mkdir()
    elif kind == "file":
        target.write_text("mine")
    else:
        (tmp_path / "other").mkdir()
        target.symlink_to(tmp_path / ("other" if kind == "link" else "nowhere"))
    writing = write_unpublished(tmp_path, 7, created="another time")
    before = content_of(tmp_path)
    with pytest.raises(FileExistsError, match="exists already") as caught:
        publish(tmp_path, 7)
    assert caught.value.filename == str(target)
    assert content_of(tmp_path) == before
    assert writing.exists()


def test_publish_is_atomic_under_a_kill_at_any_operation(tmp_path: Path) -> None:
    for folder, kill in kills(tmp_path, 3):  # open and sync the folder, rename, open and sync the parent
        files = content_of(write_unpublished(folder, 7))
        with kill as killed:
            publish(folder, 7)
        if published_steps(folder):
            assert content_of(step_folder(folder, 7)) == files
            assert complete_manifest(folder, 7).step == 7
        else:
            assert killed
            assert clear_leftovers(folder) == [".step-7.writing"]
            assert not list(folder.iterdir())


def test_quarantine_finds_a_free_name(tmp_path: Path) -> None:
    found = []
    (tmp_path / "step-7.invalid-now-2").write_text("a file")
    (tmp_path / "step-7.invalid-now-4").symlink_to("nowhere")
    for number in range(4):
        make(tmp_path, 7, created=str(number))
        found.append(quarantine(tmp_path, 7, "invalid-now"))
    assert found == [f"step-7.invalid-now{suffix}" for suffix in ("", "-3", "-5", "-6")]
    assert (tmp_path / "step-7.invalid-now-2").read_text() == "a file"
    assert b'"created": "0"' in (tmp_path / "step-7.invalid-now" / MANIFEST_FILE).read_bytes()


def test_the_quarantine_suffix_has_a_time() -> None:
    assert re.fullmatch(r"invalid-2\d{7}T\d{6}Z", invalid_kind())


def test_clear_leftovers_removes_and_returns_leftovers(tmp_path: Path) -> None:
    make(tmp_path, 5)
    write_unpublished(tmp_path, 10)
    make(tmp_path, 3).rename(tmp_path / ".step-3.deleting")
    (tmp_path / ".step-6.writing").mkdir()
    kept = content_of(step_folder(tmp_path, 5))
    assert clear_leftovers(tmp_path) == [".step-10.writing", ".step-3.deleting", ".step-6.writing"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-5"]
    assert content_of(step_folder(tmp_path, 5)) == kept


def completeness(folder: Path) -> dict[int, bool]:
    """Return for each published step whether its checkpoint is complete."""
    found = {}
    for step in published_steps(folder):
        try:
            found[step] = complete_manifest(folder, step).step == step
        except InvalidCheckpointError:
            found[step] = False
    return found


@pytest.mark.parametrize("stale", [False, True])
def test_a_deletion_killed_at_any_operation_is_completed_later(tmp_path: Path, stale: bool) -> None:
    """stale: there are leftovers of another deletion of the same step."""
    for folder, kill in kills(tmp_path, 6):
        if stale:
            make(folder, 5).rename(folder / ".step-5.deleting")
        path = make(folder, 5)
        (path / "__0_0.distcp").write_bytes(b"tensors")
        make(folder, 10)
        with kill as killed:
            delete(folder, 5)
        found = completeness(folder)
        assert found in ({5: True, 10: True}, {10: True})
        if 5 in found:
            assert stale or folder.name == "0"
            continue
        left = {entry.name for entry in folder.iterdir()} - {"step-10"}
        assert set(clear_leftovers(folder)) == left
        assert [entry.name for entry in folder.iterdir()] == ["step-10"]
        assert killed or not left


def go_back_to_10(folder: Path) -> None:
    """The changes of a start."""
    clear_leftovers(folder)
    for step, is_complete in completeness(folder).items():
        if not is_complete:
            quarantine(folder, step, "invalid-now")
    supersede_after(folder, 10)


def test_a_start_killed_at_any_operation_can_be_repeated(tmp_path: Path) -> None:
    for folder, kill in kills(tmp_path, 10):
        write_unpublished(folder, 30)
        make(folder, 3).rename(folder / ".step-3.deleting")
        for step in (5, 10, 15, 20, 25):
            make(folder, step)
        (step_folder(folder, 15) / METADATA_FILE).write_bytes(b"damage")
        before = {step: content_of(step_folder(folder, step)) for step in published_steps(folder)}
        with kill:
            go_back_to_10(folder)
        assert completeness(folder).items() >= {5: True, 10: True}.items()
        go_back_to_10(folder)
        after = {5: "step-5", 10: "step-10", 15: "step-15.invalid-now"}
        after |= {step: f"step-{step}.superseded-a1" for step in (20, 25)}
        assert {entry.name for entry in folder.iterdir()} == {*after.values()}
        assert {step: content_of(folder / name) for step, name in after.items()} == before


def test_going_back_renames_later_checkpoints_after_their_branch(tmp_path: Path) -> None:
    old, new = (Branch("a1", 0),), (Branch("a1", 0), Branch("b2", 10))
    for step, lineage in ((5, old), (10, old), (15, new), (20, new)):
        make(tmp_path, step, lineage=lineage)
    (step_folder(tmp_path, 20) / MANIFEST_FILE).unlink()
    make(tmp_path, 25, lineage=new, content="model")
    make(tmp_path, 30, format=99)
    (tmp_path / "step-15.superseded-b2").mkdir()
    kept = {step: content_of(step_folder(tmp_path, step)) for step in (5, 10, 15)}
    assert supersede_after(tmp_path, 10) == [15, 20, 25, 30]
    names = ["step-15.superseded-b2", "step-15.superseded-b2-2", "step-25.superseded-b2"]
    unknown = ["step-20.superseded-unknown", "step-30.superseded-unknown"]
    assert {entry.name for entry in tmp_path.iterdir()} == {"step-5", "step-10", *names, *unknown}
    assert {step: content_of(step_folder(tmp_path, step)) for step in (5, 10)} == {5: kept[5], 10: kept[10]}
    assert content_of(tmp_path / "step-15.superseded-b2-2") == kept[15]
    assert supersede_after(tmp_path, 10) == []


def test_a_save_killed_at_any_operation_leaves_the_checkpoints_to_keep(tmp_path: Path) -> None:
    """With a retention that deletes two checkpoints; after the kill, the next save completes it."""
    for folder, kill in kills(tmp_path, 15):
        for step in (10, 20, 30, 40):
            make(folder, step)
        (step_folder(folder, 30) / MANIFEST_FILE).unlink()
        kept = {step: content_of(step_folder(folder, step)) for step in (20, 30)}
        with kill:
            make(folder, 50)
            retain(folder, keep_latest_k=1, keep_every=0, keep=(20,))
        assert {step: content_of(step_folder(folder, step)) for step in kept} == kept
        found = completeness(folder)
        assert {step for step, is_complete in found.items() if not is_complete} == {30}
        assert 50 in found or {10, 40} <= found.keys()
        clear_leftovers(folder)
        make(folder, 60)
        retain(folder, keep_latest_k=1, keep_every=0, keep=(20,))
        assert {entry.name for entry in folder.iterdir()} == {"step-20", "step-30", "step-60"}


def test_complete_manifest_checks_step_and_file_sizes(tmp_path: Path) -> None:
    path = make(tmp_path, 5)
    assert complete_manifest(tmp_path, 5).step == 5
    data = (path / METADATA_FILE).read_bytes()
    (path / METADATA_FILE).write_bytes(data[:-1])
    with pytest.raises(InvalidCheckpointError, match=r"\.metadata \(written by rank 3\) has 5 bytes instead of 6"):
        complete_manifest(tmp_path, 5)
    (path / METADATA_FILE).write_bytes(data)
    path.rename(step_folder(tmp_path, 6))
    with pytest.raises(InvalidCheckpointError, match="belongs to step 5"):
        complete_manifest(tmp_path, 6)


def test_retention_only_counts_and_deletes_complete_full_checkpoints(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        make(tmp_path, step)
    (step_folder(tmp_path, 10) / MANIFEST_FILE).unlink()
    os.truncate(step_folder(tmp_path, 40) / METADATA_FILE, 1)
    make(tmp_path, 60, content="model")
    make(tmp_path, 70, format=99)
    assert retain(tmp_path, keep_latest_k=2, keep_every=0, keep=()) == [20]
    assert published_steps(tmp_path) == [10, 30, 40, 50, 60, 70]


@pytest.mark.parametrize(
    ("latest", "every", "keep", "deleted"),
    [
        (0, 0, (), []),
        (1, 0, (), [10, 20, 30, 40]),
        (2, 20, (), [10, 30]),
        (1, 25, (), [10, 20, 30, 40]),
        (2, 0, (10, 25), [20, 30]),
        (5, 0, (), []),
        (9, 0, (), []),
    ],
)
def test_retention_settings(tmp_path: Path, latest: int, every: int, keep: tuple[int, ...], deleted: list[int]) -> None:
    for step in (10, 20, 30, 40, 50):
        make(tmp_path, step)
    assert retain(tmp_path, keep_latest_k=latest, keep_every=every, keep=keep) == deleted
    assert published_steps(tmp_path) == [step for step in (10, 20, 30, 40, 50) if step not in deleted]


def test_retention_is_that_of_all_complete_checkpoints(tmp_path: Path) -> None:
    draw = random.Random(0)
    for number in range(25):
        folder = tmp_path / str(number)
        states = draw.choices(["full", "full", "full", "model", "short"], k=draw.randrange(13))
        latest, every, keep = draw.randrange(5), draw.randrange(5), {*draw.sample(range(1, 13), draw.randrange(4))}
        for step, state in enumerate(states, 1):
            path = make(folder, step, content="model" if state == "model" else "full")
            if state == "short":
                os.truncate(path / METADATA_FILE, 1)
        full = [step for step, state in enumerate(states, 1) if state == "full"]
        kept = {*full[-latest:], *keep, *(step for step in full if every and step % every == 0)}
        expected = [step for step in full if step not in kept] if latest else []
        assert retain(folder, latest, every, keep) == expected, (states, latest, every, keep)


def test_retention_does_not_read_what_it_keeps_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []
    stat = Path.stat

    def noted(path: Path, **keys: Any) -> os.stat_result:
        reads.append(path)
        return stat(path, **keys)

    monkeypatch.setattr(Path, "stat", noted)
    counts = []
    for kept in (4, 40):
        folder = tmp_path / str(kept)
        for step in (*range(100, 100 * kept + 100, 100), 100 * kept + 10, 100 * kept + 20, 100 * kept + 30):
            make(folder, step)
        reads.clear()
        assert retain(folder, keep_latest_k=2, keep_every=100, keep=(100,)) == [100 * kept + 10]
        counts.append(len([path for path in reads if path.name == METADATA_FILE]))
    assert counts == [3, 3]


@pytest.mark.parametrize("version", [FORMAT_VERSION - 1, GRID_FORMAT_VERSION + 1])
def test_another_format_is_not_deleted_or_reported_as_corrupted(version: int, tmp_path: Path) -> None:
    make(tmp_path, 5, format=version)
    make(tmp_path, 10)
    assert retain(tmp_path, keep_latest_k=1, keep_every=0, keep=()) == []
    assert clear_leftovers(tmp_path) == []
    with pytest.raises(UnknownFormatError):
        complete_manifest(tmp_path, 5)
