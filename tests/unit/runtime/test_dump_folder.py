"""The dump folder: an earlier run's files are always kept."""

from pathlib import Path

import pytest

from titanlite.runtime.dump_folder import make_dump_folder, prepare_dump_folder
from titanlite.runtime.errors import UserError

pytestmark = pytest.mark.usefixtures("propagating_log")

OUTPUTS = ("metrics.jsonl", "config.toml", "tb")


def write(folder: Path, text: str, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_new_folder_is_created_with_its_parents(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert prepare_dump_folder(tmp_path / "a" / "b", OUTPUTS, rank=0) == []
    assert list((tmp_path / "a" / "b").iterdir()) == []
    assert not caplog.records


FILES = ("metrics.jsonl", "config.toml", "tb/events")


@pytest.mark.parametrize(
    ("before", "moved"),
    [
        (FILES, ["metrics.jsonl.1", "config.toml.1", "tb.1"]),
        (["config.toml"], ["config.toml.1"]),  # a run that died early
        (["notes.txt", "tb.old"], []),
        ([*FILES, "metrics.jsonl.2"], ["metrics.jsonl.1", "config.toml.1", "tb.1"]),  # the smallest free number
        (["metrics.jsonl", "config.toml", "tb.1/events", "config.toml.2"], ["metrics.jsonl.3", "config.toml.3"]),
    ],
)
def test_files_of_an_earlier_run_are_renamed(
    before: list[str], moved: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "kept", *before)
    assert [path.name for path in prepare_dump_folder(tmp_path, OUTPUTS, rank=0)] == moved
    number = moved[0].rpartition(".")[2] if moved else ""
    renamed = {f"{name}.{number}{slash}{inside}" for name, slash, inside in (file.partition("/") for file in FILES)}
    kept = {name for name in before if name not in FILES}
    assert contents(tmp_path).keys() == kept | {name for name in renamed if name.partition("/")[0] in moved}
    assert set(contents(tmp_path).values()) == {"kept"}
    lines = [f"{tmp_path} has files of an earlier run; renamed to {', '.join(moved)}"]
    assert caplog.messages == (lines if moved else [])


def test_each_run_keeps_its_files_under_its_own_number(tmp_path: Path) -> None:
    for text in ("first", "second", "third"):
        prepare_dump_folder(tmp_path, OUTPUTS, rank=0)
        write(tmp_path, text, *FILES)
    assert contents(tmp_path) == {
        f"{name}{suffix}{inside}": text
        for suffix, text in ((".1", "first"), (".2", "second"), ("", "third"))
        for name, inside in (("metrics.jsonl", ""), ("config.toml", ""), ("tb", "/events"))
    }


def test_symlinks_are_renamed_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "elsewhere").write_text("far")
    (folder / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    (folder / "config.toml").symlink_to(tmp_path / "nowhere")
    moved = prepare_dump_folder(folder, OUTPUTS, rank=0)
    assert [(path.name, path.is_symlink()) for path in moved] == [("metrics.jsonl.1", True), ("config.toml.1", True)]
    assert (tmp_path / "elsewhere").read_text() == "far"


def test_a_nested_tensorboard_folder(tmp_path: Path) -> None:
    (tmp_path / "logs" / "tb").mkdir(parents=True)
    assert prepare_dump_folder(tmp_path, ("metrics.jsonl", "logs/tb"), rank=0) == [tmp_path / "logs" / "tb.1"]


def test_other_ranks_do_not_access_the_disk(tmp_path: Path) -> None:
    write(tmp_path, "first", *FILES)
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
    with pytest.raises(UserError, match=r"out: .*file is a file, not a folder; give another folder with --out"):
        make_dump_folder(tmp_path / "file", "out")


def test_an_unwritable_folder_raises_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # permissions do not bind root
    with pytest.raises(UserError, match=r"job\.dump_folder: no permission to write in"):
        prepare_dump_folder(tmp_path, OUTPUTS, rank=0)
