"""Pieces, and their cached index: built once by concurrent processes, rebuilt if any of its inputs changes."""

import gzip
import json
import logging
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from titanlite.data import corpus, indexing
from titanlite.data.corpus import PieceIndex
from titanlite.data.kinds import text_sources
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.pieces import ENDS_DOCUMENT, STARTS_DOCUMENT, BadRowError, cut, lines, utf8_text
from titanlite.data.sources.stored import read_range
from titanlite.data.sources.text import Text
from titanlite.ranks.launch import fork_context
from titanlite.runtime import waiting
from titanlite.runtime.cache import built_once, cache_folder, content_key
from titanlite.runtime.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def open_index(source: SourceConfig, max_piece_bytes: int) -> PieceIndex:
    return corpus.open_index(*text_sources([source]), max_piece_bytes)


def count_builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    built: list[str] = []
    build = corpus._build

    def counting(*args: object) -> None:
        built.append(str(args[0]))
        build(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(corpus, "_build", counting)
    return built


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("TITANLITE_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "titanlite"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "home" / ".cache" / "titanlite"


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TITANLITE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
    with pytest.raises(UserError, match="set TITANLITE_CACHE"):
        cache_folder()


def test_an_index_is_built_once(write_jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    built = count_builds(monkeypatch)
    source = SourceConfig(kind="jsonl", path=str(write_jsonl(["one", "two"])))
    first, second = open_index(source, 1000), open_index(source, 1000)
    assert len(built) == 1
    assert np.array_equal(first.records, second.records)
    assert isinstance(second.records, np.memmap)
    assert second.records.dtype == np.int64


def test_a_damaged_index_is_built_again(write_jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/unit/runtime/test_cache.py has other damage."""
    built = count_builds(monkeypatch)
    source = SourceConfig(kind="jsonl", path=str(write_jsonl(["one", "two", "three"])))
    before = np.array(open_index(source, 1000).records)
    (file,) = (cache_folder() / "index").rglob("pieces.bin")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    for _ in range(2):
        assert np.array_equal(open_index(source, 1000).records, before)
        assert len(built) == 2


def test_an_index_is_rebuilt_after_a_change(write_jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    built = count_builds(monkeypatch)
    file = write_jsonl(["one", "two"])
    source = SourceConfig(kind="jsonl", path=str(file))
    open_index(source, 1000)
    open_index(source, 999)
    open_index(SourceConfig(kind="jsonl", path=str(file), field="body"), 1000)
    open_index(SourceConfig(kind="text", path=str(file)), 1000)
    open_index(SourceConfig(kind="text", path=str(file), document="line"), 1000)
    os.utime(file, ns=(1, 1))
    open_index(source, 1000)
    write_jsonl(["three", "four", "five"])
    os.utime(file, ns=(1, 1))
    assert len(open_index(source, 1000)) == 3
    assert len(built) == 7


def test_a_file_replaced_by_one_of_the_same_size_and_time_gets_a_new_index(write_jsonl: Callable[..., Path]) -> None:
    file = write_jsonl(["one", "two"])
    source = SourceConfig(kind="jsonl", path=str(file))
    assert open_index(source, 1000)[1].offset == len('{"text": "one"}\n')
    other = write_jsonl(["o", "two ..."[:5]], "other.jsonl")
    facts = file.stat()
    assert other.stat().st_size == facts.st_size
    os.utime(other, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    other.rename(file)
    assert open_index(source, 1000)[1].offset == len('{"text": "o"}\n')


def test_a_key_of_one_kind_gets_an_index_per_value(tmp_path: Path) -> None:
    class Marked(Text):
        kind = "marked"
        keys = ("document", "dtype")

    found = [
        Marked(SourceConfig("text", str(tmp_path), dtype=dtype)).index_settings() for dtype in ("uint16", "uint32")
    ]
    assert found[0] != found[1]
    assert Text(SourceConfig("text", str(tmp_path))).index_settings() == ["text", "text", "file", "train"]


def test_a_large_index_is_written_in_blocks(write_jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "FLUSH_PIECES", 4)
    index = open_index(SourceConfig(kind="jsonl", path=str(write_jsonl([str(n) for n in range(11)]))), 1000)
    assert [index[n].row for n in range(len(index))] == list(range(1, 12))


@pytest.mark.slow
def test_several_processes_write_the_index_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte, with empty and bad files; the error is that of the first file that has one."""
    monkeypatch.setattr(indexing, "SHARED_BYTES", 0)
    (tmp_path / "in").mkdir()
    for n in range(12):
        texts = (json.dumps({"text": "x" * (n * row % 97)}) + "\n" for row in range(40 * (n % 4)))
        (tmp_path / "in" / f"{n:02}.jsonl").write_text("".join(texts))
    (tmp_path / "in" / "03.jsonl.gz").write_bytes(gzip.compress(b'{"text": "packed"}\n') + b"damage")
    source, built = SourceConfig(kind="jsonl", path=str(tmp_path / "in")), list[dict[str, bytes]]()
    for cores in (1, 3):
        monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / f"cache-{cores}"))
        monkeypatch.setattr(indexing, "usable_cores", lambda cores=cores: cores)
        open_index(source, 60)
        (folder,) = (cache_folder() / "index").glob("*[!k]")
        built.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert built[0] == built[1]
    assert len(built[0]["pieces.bin"]) > 50_000
    (opened,) = text_sources([source])
    files = [tmp_path / "in" / name for name in ("00.jsonl", "missing", "02.jsonl", "other")]
    monkeypatch.setattr(indexing, "size_of", lambda _: 1)
    with open(tmp_path / "out", "wb") as out, pytest.raises(UserError, match=r"missing cannot be read: .*No such file"):
        indexing.scan_in_processes(opened, files, 60, out, tmp_path, 2, lambda _: None)


def test_small_and_made_sources_are_indexed_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "usable_cores", lambda: 4)
    (source,) = text_sources([SourceConfig(kind="text", path=str(tmp_path))])
    files = [tmp_path / "a", tmp_path / "b"]
    assert indexing.processes_for(source, files, indexing.SHARED_BYTES - 1) == 1
    assert indexing.processes_for(source, files, indexing.SHARED_BYTES) == 2
    source.select(files, None)  # a part, which a worker reads
    assert indexing.processes_for(source, files, indexing.SHARED_BYTES) == 1


def slow_build(folder: Path) -> None:
    with open(folder.parent / "builds", "a") as file:
        file.write("x")
    (folder / "started").touch()
    time.sleep(0.3)
    (folder / "finished").touch()


def build_in_child(folder: Path) -> None:
    assert (built_once(folder, "a thing", slow_build) / "finished").exists()


@pytest.mark.parametrize("killed", [False, True])
def test_another_process_waits_for_a_build_and_repeats_it_if_it_is_killed(
    killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "thing"
    child = fork_context().Process(target=build_in_child, args=(folder,))
    child.start()
    while not (tmp_path / "thing.incomplete" / "started").exists():
        time.sleep(0.01)
    assert child.pid is not None
    if killed:
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    monkeypatch.setattr(waiting, "FIRST_S", 0.01)
    with caplog.at_level(logging.INFO, "titanlite"):
        build_in_child(folder)
    child.join()
    assert not (tmp_path / "thing.incomplete").exists()
    assert (tmp_path / "builds").read_text() == ("xx" if killed else "x")
    lock = tmp_path / "thing.lock"
    waits = [re.sub(r"\d+ s", "N s", message) for message in caplog.messages]
    assert killed or waits == [
        f"waiting for N s for another process to build a thing; it holds {lock}: end it if it hangs"
    ]


def test_a_failed_build_publishes_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "started").touch()
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        built_once(tmp_path / "thing", "a thing", fail)
    assert not (tmp_path / "thing").exists()


def test_the_error_for_an_unwritable_cache_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="TITANLITE_CACHE"):
        built_once(tmp_path / "file" / "thing", "a thing", slow_build)


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret.txt").write_text("x")

    def refuse(*_: object) -> None:
        raise PermissionError("no permission")

    monkeypatch.setattr(Text, "scan", refuse)
    with pytest.raises(UserError, match=r"secret\.txt cannot be read: no permission$"):
        open_index(SourceConfig(kind="text", path=str(tmp_path / "secret.txt")), 1000)


def test_keys_change_with_the_facts() -> None:
    facts = [["pieces", 1], ["pieces", 2], ["pieces", "1"], ["pieces", 1, None]]
    assert len({content_key(fact) for fact in facts}) == len(facts)


def random_text(rng: random.Random) -> bytes:
    alphabet = "abc\né€😀" + "x" * rng.randrange(20)
    return "".join(rng.choice(alphabet) for _ in range(rng.randrange(200))).encode()


def test_parts_cover_the_text_and_are_utf8_of_at_most_the_size() -> None:
    rng = random.Random(0)
    for _ in range(500):
        data, size = random_text(rng), rng.randrange(16, 60)
        cuts = [*cut(data, 0, len(data), size)]
        parts = [data[begin:end] for begin, end, _ in cuts]
        assert b"".join(parts) == data
        assert [bool(flags & STARTS_DOCUMENT) for _, _, flags in cuts] == [n == 0 for n in range(len(cuts))]
        assert [bool(flags & ENDS_DOCUMENT) for _, _, flags in cuts] == [n == len(cuts) - 1 for n in range(len(cuts))]
        assert all(0 < len(part) <= size for part in parts)
        for part in parts:
            part.decode("utf-8")


def test_cuts_after_the_last_line_end_that_fits() -> None:
    data = b"one\ntwo\nthree\nfour is a line that does not fit\n"
    assert [data[begin:end] for begin, end, _ in cut(data, 0, len(data), 16)] == [
        b"one\ntwo\nthree\n",
        b"four is a line t",
        b"hat does not fit",
        b"\n",
    ]


def test_bytes_that_are_not_utf8_are_cut_too() -> None:
    data = b"\x80" * 100
    parts = list(cut(data, 0, 100, 16))
    assert parts[0][0] == 0
    assert parts[-1][1] == 100
    assert max(end - begin for begin, end, _ in parts) <= 16


def test_blank_lines_are_counted_and_skipped() -> None:
    data = b"\n  \nfirst\r\n\nlast"
    assert [(number, data[begin:end]) for number, begin, end in lines(data)] == [(3, b"first"), (5, b"last")]


def test_text_is_utf8_and_not_empty() -> None:
    assert utf8_text("é".encode()) == "é"
    with pytest.raises(BadRowError, match="invalid UTF-8 at byte 2"):
        utf8_text(b"ab\xff")
    with pytest.raises(BadRowError, match="empty"):
        utf8_text(b"")


def test_a_file_that_shrank_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_range(tmp_path / "file", 1, 3) == b"234"
    with pytest.raises(OSError, match="shorter"):
        read_range(tmp_path / "file", 3, 3)
