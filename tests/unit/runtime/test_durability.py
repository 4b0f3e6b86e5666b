"""Files that are replaced atomically."""

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
