"""Files that are replaced atomically: config.toml, the lock of the dump folder, the probe of the checkpoint folder."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.unit.planted import planted_at
from titanlite.checkpoint.saver import probe
from titanlite.runtime.durability import replace_file
from titanlite.runtime.job_lock import JOB_LOCK_FILE, job_lock


@pytest.mark.parametrize("planted", ["link", "pipe"])
def test_a_link_or_pipe_with_the_temporary_name_is_replaced(
    tmp_path: Path, group: dist.ProcessGroup, planted: str
) -> None:
    path = tmp_path / "config.toml"
    with planted_at(tmp_path / "config.toml.new", planted):
        replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    with planted_at(tmp_path / ".probe.new", planted):
        probe(tmp_path, 1, group)
    with planted_at(tmp_path / f"{JOB_LOCK_FILE}.new", planted), job_lock(tmp_path, 0, take_over=False, environment={}):
        assert (tmp_path / JOB_LOCK_FILE).stat().st_size > 0
    assert {file.name for file in tmp_path.iterdir()} <= {"config.toml", "precious"}


def test_a_leftover_is_replaced_and_a_folder_with_its_name_is_an_error(tmp_path: Path) -> None:
    leftover = tmp_path / "file.new"
    leftover.write_text("longer than the new content")
    replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    leftover.mkdir()
    with pytest.raises(OSError, match=r"file\.new"):
        replace_file(tmp_path / "file", b"newer")
    assert (tmp_path / "file").read_bytes() == b"new"
