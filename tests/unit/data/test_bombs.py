"""Small files of much data, and long lines: a bad row, found before they fill the memory or the disk."""

import gzip
import io
from pathlib import Path

import pyarrow as pa
import pytest

from tests.unit.data.test_bad_rows import zstd
from tests.unit.data.test_readers import read_all
from tests.unit.data.test_tables import arrow, write_stream
from titanlite.data.kinds import open_source
from titanlite.data.sources import limits
from titanlite.data.sources.base import Share, StreamedSource, TextSource
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.jsonl import numbered_lines
from titanlite.data.sources.pieces import BadRowError

MEBIBYTE = 2**20
MODULES = ("limits", "jsonl", "tables", "ipc", "parquet")
LINE = b'{"text": "the model reads"}\n'


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of 1 MiB in place of 256 MiB and 1 GiB, and of 2,000 rows."""
    small = dict.fromkeys(("MAX_ROW_BYTES", "MAX_UNPACKED_BYTES", "MAX_LOADED_BYTES"), MEBIBYTE)
    for name, value in (small | {"MAX_SHORT_ROWS": 2000}).items():
        for module in MODULES:
            monkeypatch.setattr(f"titanlite.data.sources.{module}.{name}", value, raising=False)


def texts(path: Path, kind: str = "jsonl", max_piece_bytes: int = 1000) -> list[str]:
    source = open_source(SourceConfig(kind, path=str(path)))  # type: ignore[arg-type]
    assert isinstance(source, TextSource)
    return [text for _, text, _ in read_all(source, path, max_piece_bytes)]


def save(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


BOMBS = {"a long line": b"x" * 2**22, "blank lines": b"\n" * 2**21, "short lines": b"{}\n" * 2**20}


@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.csv.zst", "a.jsonl.gz"])
def test_a_compressed_bomb_is_one_bad_row(
    name: str, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("TITANLITE_CACHE", str(cache))
    if name.endswith(".gz"):
        monkeypatch.setattr(limits, "MAX_RATIO", 100)
    path = save(tmp_path / name, gzip.compress(content) if name.endswith(".gz") else zstd(content))
    kind = "csv" if "csv" in name else "jsonl"
    source = open_source(SourceConfig(kind, path=str(path)))  # type: ignore[arg-type]
    source.check_content("data.sources.0", vocab_size=300, needs_documents=False)
    (row,) = texts(path, kind)
    assert row.startswith(("BAD the zstd data is not ", "BAD the gzip data is not ", "BAD the file ", "BAD field"))
    assert sum(file.stat().st_size for file in cache.rglob("*") if file.is_file()) < 1000


def test_a_streamed_bomb_is_one_bad_row(tmp_path: Path) -> None:
    for number, content in enumerate(BOMBS.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        save(folder / "train.jsonl.zst", zstd(content))
        source = open_source(SourceConfig("hf", path=str(folder)))
        assert isinstance(source, StreamedSource)
        rows = [row.text for unit in source.row_groups() for row in source.rows(unit, 1, Share())]
        assert isinstance(rows[-1], BadRowError)
        assert "the zstd data is not unpacked: " in str(rows[-1])


def test_text_that_compresses_well_is_read(tmp_path: Path) -> None:
    lines = [b'{"text": "row %d of a log that repeats itself, again and again and again"}\n' % n for n in range(5_000)]
    for name, pack in (("a.jsonl.zst", zstd), ("a.jsonl.gz", gzip.compress)):
        path = save(tmp_path / name, pack(b"".join(lines)))
        assert path.stat().st_size * 8 < len(b"".join(lines))
        assert len(texts(path)) == len(lines)


def test_a_long_line_is_not_loaded() -> None:
    long = b"y" * (2 * MEBIBYTE)
    opened = io.BufferedReader(io.BytesIO(LINE + long + b"\r\n\n" + LINE + long))  # type: ignore[arg-type]
    found = list(numbered_lines(opened))
    assert [number for number, _ in found] == [1, 2, 3, 4, 5]
    bad = f"the line has {2 * MEBIBYTE + 2:,} bytes, more than 1,048,576: divide its text"
    assert [str(line) if isinstance(line, BadRowError) else line for _, line in found[:4]] == [LINE, bad, b"\n", LINE]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_long_line_is_a_bad_row(name: str, tmp_path: Path) -> None:
    line = {"a.jsonl": LINE, "a.csv": b"text\nthe model reads\n"}[name]
    path = save(tmp_path / name, line + b"z" * (2 * MEBIBYTE) + b"\n")
    source = open_source(SourceConfig(name[2:], path=str(path)))  # type: ignore[arg-type]
    assert not source.check_content("data.sources.0", vocab_size=300, needs_documents=False)
    good, bad = texts(path, name[2:])
    assert good == "the model reads"
    assert bad.startswith(("BAD the line has 2,097,152 bytes", "BAD the file is damaged after row 1: a line has more"))


def test_a_long_value_of_csv_is_a_bad_row(tmp_path: Path) -> None:
    value = b'"' + b"a line\n" * 150_100 + b'"\n'
    good, bad = texts(save(tmp_path / "a.csv", b"text\ngood\n" + value), "csv")[:2]
    assert (good, bad) == ("good", "BAD invalid CSV at line 149799: field larger than field limit (1048576)")


def test_a_dictionary_of_arrow_is_not_expanded(tmp_path: Path) -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 50, pa.int8()), ["x" * 2**16])
    write_stream(pa.table({"text": column}), tmp_path / "a.arrow")
    before = pa.total_allocated_bytes()
    (row,) = [text for _, text, _ in read_all(arrow(), tmp_path / "a.arrow", 1000)][-1:]
    assert row.startswith(("x", "BAD the file is not read: its text of "))
    assert pa.total_allocated_bytes() - before < MEBIBYTE
