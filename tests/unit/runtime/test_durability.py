"""Files that are replaced atomically."""

import os
import sys
from pathlib import Path

import pytest

from tests.unit.planted import planted_at
from titanlite.runtime.durability import appears_complete, replace_file


@pytest.mark.parametrize("planted", ["link", "pipe"])
def test_a_link_or_pipe_with_the_temporary_name_is_replaced(tmp_path: Path, planted: str) -> None:
    path = tmp_path / "config.toml"
    with planted_at(tmp_path / "config.toml.incomplete", planted):
        replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert {file.name for file in tmp_path.iterdir()} <= {"config.toml", "precious"}


def test_a_leftover_is_replaced_and_a_folder_with_its_name_is_an_error(tmp_path: Path) -> None:
    leftover = tmp_path / "file.incomplete"
    leftover.write_text("longer than the new content")
    replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    leftover.mkdir()
    with pytest.raises(OSError, match=r"file\.incomplete"):
        replace_file(tmp_path / "file", b"newer")
    assert (tmp_path / "file").read_bytes() == b"new"
    leftover.rmdir()
    with pytest.raises(IsADirectoryError), appears_complete(tmp_path / "file") as temporary:  # noqa: PT012
        temporary.mkdir()
        (temporary / "part").write_text("unfinished")
        temporary.write_text("raises")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"new"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_content_is_on_the_disk_before_the_name_and_the_name_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, rename = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        sync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        events.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    replace_file(tmp_path / "file", b"new")
    assert events == ["sync file.incomplete", "rename", f"sync {tmp_path.name}"]
    events.clear()
    with appears_complete(tmp_path / "folder") as temporary:
        temporary.mkdir()
        (temporary / "part").touch()
    assert events == ["sync part", "sync folder.incomplete", "rename", f"sync {tmp_path.name}"]
