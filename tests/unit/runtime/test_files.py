"""Files: which are refused, atomic replacement, and strict reading of JSON, which neither waits nor recurses."""

import io
import os
import socket
import sys
import tracemalloc
from pathlib import Path

import pytest
from typing_extensions import TypedDict

from tests.unit.planted import planted_at
from titanlite.runtime.durability import appears_complete, replace_file, write_file
from titanlite.runtime.files import NotRegularError, OpenFile, OpenFiles, open_regular, open_to_append, read_at
from titanlite.runtime.json_files import BLOCK_BYTES, MAX_DEPTH, JsonError, parse_json, read_json, read_regular


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


@pytest.mark.parametrize("target", ["file", "missing", "folder"])
def test_what_is_appended_does_not_follow_links(tmp_path: Path, target: str) -> None:
    (tmp_path / "file").write_bytes(b"before")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(OSError, match=f"it is a link to '{target}', which is not followed"):
        open_to_append(tmp_path / "link")
    assert (tmp_path / "file").read_bytes() == b"before"
    assert not (tmp_path / "missing").exists()


def test_a_file_replaced_by_a_link_between_check_and_open_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    facts = os.lstat(tmp_path / "file")
    monkeypatch.setattr(os, "lstat", lambda _: facts)
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        open_to_append(tmp_path / "link")


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


class Schema(TypedDict):
    count: int
    names: list[str]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "is not JSON"),
        (b"[1]", "is not a JSON object"),
        (b"null", "is not a JSON object"),
        (b"{", "is not JSON"),
        (b'\xff{"a": 1}', "is not JSON"),
        (b'{"a": 1} x', "is not JSON"),
        (b'{"a": 1, "b": 2, "a": 3}', "has 'a' twice"),
        (b'{"a": {"b": [{"c": 1, "c": 2, "c": 3}]}}', "has 'c' 3 times"),
        (b'{"a": NaN}', "NaN, which is not finite"),
        (b'{"a": -Infinity}', "-Infinity, which is not finite"),
        (b'{"a": 1e999}', "1e999, which is not finite"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON: Exceeds the limit"),
        (b'{"a": ' + b"[" * 100_000, "is not JSON: "),  # too deep for Python 3.13
        (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", f"has more than {MAX_DEPTH} levels"),
        (b'{"a": ' + b'{"a":' * 70 + b"1" + b"}" * 71, f"has more than {MAX_DEPTH} levels"),
    ],
)
def test_bad_content_is_refused_with_a_reason(text: bytes, reason: str) -> None:
    with pytest.raises(JsonError) as caught:
        parse_json(text)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"count": 1}', "is invalid: names: Field required"),
        (b'{"count": "1", "names": []}', "is invalid: count: Input should be a valid integer"),
        (b'{"count": 1, "names": ["a", "b", 3]}', "is invalid: names.2: Input should be a valid string"),
    ],
)
def test_a_schema_is_enforced_in_all_items(text: bytes, reason: str) -> None:
    with pytest.raises(JsonError) as caught:
        parse_json(text, Schema)
    assert reason in str(caught.value)
    assert parse_json(b'{"count": 1, "names": ["a"]}', Schema) == {"count": 1, "names": ["a"]}


def test_memory_follows_the_size_of_the_file_not_the_limit(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"1")
    (tmp_path / "large").write_bytes(b"12" * BLOCK_BYTES)
    tracemalloc.start()
    try:
        assert read_regular(tmp_path / "small") == b"1"
        assert tracemalloc.get_traced_memory()[1] < 8 * BLOCK_BYTES
    finally:
        tracemalloc.stop()
    assert read_regular(tmp_path / "large", 2 * BLOCK_BYTES) == b"12" * BLOCK_BYTES
    with pytest.raises(JsonError, match=f"has more than {2 * BLOCK_BYTES - 1:,} bytes"):
        read_regular(tmp_path / "large", 2 * BLOCK_BYTES - 1)


@pytest.mark.timeout(10)
def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path):
        with pytest.raises((JsonError, IsADirectoryError)):
            read_regular(path)
    (tmp_path / "file").write_bytes(b'{"a": 1}')
    assert read_json(tmp_path / "file") == {"a": 1}
    with pytest.raises(JsonError, match="has more than 7 bytes"):
        read_regular(tmp_path / "file", 7)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "missing")


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
    with pytest.raises(KeyboardInterrupt), appears_complete(tmp_path / "file") as temporary:  # noqa: PT012
        temporary.mkdir()
        (temporary / "part").write_text("unfinished")
        raise KeyboardInterrupt
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
    events.clear()
    write_file(tmp_path / "other", b"new")
    assert events == ["sync other"]


@pytest.mark.parametrize(("may_open", "kept"), [(8, 2), (1024, 3), (-1, 3)])
def test_files_stay_open_up_to_a_quarter_of_what_the_process_may_open(
    may_open: int, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (may_open, may_open))
    files, paths = OpenFiles(3), [tmp_path / f"{n}" for n in range(5)]
    for n, path in enumerate(paths):
        path.write_bytes(b"%d" % n)
    numbers = [files.add(OpenFile(path)) for path in paths]
    for _ in range(2):
        found = [files.get(*each).read(0, 9) for each in zip(numbers, paths, strict=True)]
        assert found == [b"0", b"1", b"2", b"3", b"4"]
        assert len(files._open) == kept
