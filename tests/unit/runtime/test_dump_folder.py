"""The dump folder: an earlier run's files are always kept."""

import logging
from pathlib import Path

import pytest

from titanlite.runtime.dump_folder import prepare_dump_folder
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log

OUTPUTS = ("metrics.jsonl", "config.toml", "tb")


@pytest.fixture(autouse=True)
def _log_reaches_caplog(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(log, "propagate", True)
    caplog.set_level(logging.INFO, logger="titanlite")


def run_in(folder: Path, text: str, *, tensorboard: bool = True) -> list[str]:
    """Write the files of one run; returns the new names of the renamed files."""
    moved = prepare_dump_folder(folder, OUTPUTS, rank=0)
    (folder / "metrics.jsonl").write_text(text)
    (folder / "config.toml").write_text(text)
    if tensorboard:
        (folder / "tb").mkdir()
        (folder / "tb" / "events").write_text(text)
    return [path.name for path in moved]


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_new_folder_is_created_with_its_parents(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert prepare_dump_folder(tmp_path / "a" / "b", OUTPUTS, rank=0) == []
    assert list((tmp_path / "a" / "b").iterdir()) == []
    assert not caplog.records


def test_each_run_keeps_its_files_under_its_own_number(tmp_path: Path) -> None:
    assert run_in(tmp_path, "first") == []
    assert run_in(tmp_path, "second") == ["metrics.jsonl.1", "config.toml.1", "tb.1"]
    assert run_in(tmp_path, "third") == ["metrics.jsonl.2", "config.toml.2", "tb.2"]
    assert contents(tmp_path) == {
        f"{name}{suffix}{inside}": text
        for suffix, text in ((".1", "first"), (".2", "second"), ("", "third"))
        for name, inside in (("metrics.jsonl", ""), ("config.toml", ""), ("tb", "/events"))
    }


def test_one_log_line_names_the_renamed_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_in(tmp_path, "first")
    run_in(tmp_path, "second")
    (record,) = caplog.records
    message = record.getMessage()
    assert "\n" not in message
    assert str(tmp_path) in message
    assert message.endswith("metrics.jsonl.1, config.toml.1, tb.1")


def test_a_number_used_by_one_name_is_not_used_for_others(tmp_path: Path) -> None:
    (tmp_path / "tb.1").mkdir()
    (tmp_path / "config.toml.2").write_text("kept")
    run_in(tmp_path, "first", tensorboard=False)
    assert run_in(tmp_path, "second") == ["metrics.jsonl.3", "config.toml.3"]
    assert (tmp_path / "config.toml.2").read_text() == "kept"


def test_the_smallest_free_number_is_used(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl.2").write_text("kept")
    run_in(tmp_path, "first")
    assert run_in(tmp_path, "second") == ["metrics.jsonl.1", "config.toml.1", "tb.1"]
    assert (tmp_path / "metrics.jsonl.2").read_text() == "kept"


def test_files_of_a_run_that_died_early_are_kept(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("died before its first step")
    assert run_in(tmp_path, "second") == ["config.toml.1"]


def test_other_files_are_not_renamed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    run_in(tmp_path, "first")
    run_in(tmp_path, "second")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_symlinks_are_renamed_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "elsewhere").write_text("far")
    (folder / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    (folder / "config.toml").symlink_to(tmp_path / "nowhere")
    assert run_in(folder, "second") == ["metrics.jsonl.1", "config.toml.1"]
    assert (tmp_path / "elsewhere").read_text() == "far"
    assert not (tmp_path / "nowhere").exists()


def test_a_nested_tensorboard_folder(tmp_path: Path) -> None:
    (tmp_path / "logs" / "tb").mkdir(parents=True)
    assert prepare_dump_folder(tmp_path, ("metrics.jsonl", "logs/tb"), rank=0) == [tmp_path / "logs" / "tb.1"]


def test_other_ranks_do_not_access_the_disk(tmp_path: Path) -> None:
    run_in(tmp_path, "first")
    before = contents(tmp_path)
    assert prepare_dump_folder(tmp_path, OUTPUTS, rank=1) == []
    assert prepare_dump_folder(tmp_path / "new", OUTPUTS, rank=1) == []
    assert contents(tmp_path) == before
    assert not (tmp_path / "new").exists()


def test_a_file_in_place_of_the_folder_raises_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"job\.dump_folder: .*file is a file, not a folder; give another folder"):
        prepare_dump_folder(tmp_path / "file", OUTPUTS, rank=0)
    with pytest.raises(UserError, match=r"job\.dump_folder: cannot create .*sub: Not a directory"):
        prepare_dump_folder(tmp_path / "file" / "sub", OUTPUTS, rank=0)


def test_an_unwritable_folder_raises_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # permissions do not bind root
    with pytest.raises(UserError, match=r"job\.dump_folder: no permission to write in"):
        prepare_dump_folder(tmp_path, OUTPUTS, rank=0)
