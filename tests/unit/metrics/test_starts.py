"""starts.jsonl: a line per start, also after a truncated one."""

from pathlib import Path

import pytest

from titanlite.metrics.starts import note_start, read_starts
from titanlite.runtime.errors import UserError

MESH = {"pp": 1, "dp_shard": 2}


def test_starts_are_read_as_noted(tmp_path: Path) -> None:
    assert read_starts(tmp_path) == []
    note_start(tmp_path, 0, MESH)
    file = tmp_path / "starts.jsonl"
    file.write_bytes(file.read_bytes() + b'{"step": 3')
    note_start(tmp_path, 5, MESH)
    file.write_bytes(file.read_bytes() + b'{"step": 7, "time": "yesterday", "mesh": {}}\n')
    starts = read_starts(tmp_path)
    assert [(start.step, start.mesh) for start in starts] == [(0, MESH), (5, MESH)]
    assert starts[0].moment <= starts[1].moment


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "starts.jsonl").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*starts\.jsonl: Is a directory; fix this"):
        note_start(tmp_path, 0, MESH)
