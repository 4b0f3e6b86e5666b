"""Opening files: what is refused, and that nothing waits."""

import io
import os
import socket
from pathlib import Path

import pytest

from titanlite.runtime.files import NotRegularError, open_regular, read_at


@pytest.mark.timeout(10)
def test_pipes_devices_and_sockets_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    for name, kind in {"pipe": "pipe", "zero": "device", "socket": "socket"}.items():
        with pytest.raises(NotRegularError, match=f"^not a regular file but a {kind}$"):
            open_regular(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "dangling")


@pytest.mark.timeout(10)
def test_a_file_replaced_by_a_pipe_between_check_and_open_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    facts = os.stat(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(os, "stat", lambda *_, **__: facts)
    with pytest.raises(NotRegularError):
        open_regular(tmp_path / "pipe")


def test_reading_continues_after_partial_reads_and_ends_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: preadv(file, [parts[0][:7]], at))
    out = bytearray(50)
    with open_regular(tmp_path / "file") as file:
        assert isinstance(file, io.BufferedReader)
        assert read_at(file.fileno(), memoryview(out), 30) == 50
        assert out == bytes(range(30, 80))
        assert read_at(file.fileno(), memoryview(out), 90) == 10
        assert out[:10] == bytes(range(90, 100))
        assert read_at(file.fileno(), memoryview(out), 100) == 0
