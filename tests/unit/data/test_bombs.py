"""Small files of much data, and long lines: a bad row, found before they fill the memory or the disk."""

import gzip
import io
import itertools
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.data.test_bad_rows import zstd
from tests.unit.data.test_readers import read_all
from tests.unit.data.test_tables import arrow, write_stream
from titanlite.data.kinds import open_source
from titanlite.data.sources import limits, parquet
from titanlite.data.sources.base import Share, StreamedSource, TextSource
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.jsonl import numbered_lines
from titanlite.data.sources.parquet_pages import batch_rows
from titanlite.data.sources.pieces import BadRowError

MEBIBYTE = 2**20
TOO_LONG = "its text is more than 1,000 times as long as its data; if you trust it, "
MODULES = ("limits", "jsonl", "tables", "ipc", "parquet", "parquet_pages")
LINE = b'{"text": "the model reads"}\n'


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of 1 MiB in place of 256 MiB and 1 GiB, and of 2,000 rows."""
    small = dict.fromkeys(("MAX_ROW_BYTES", "MAX_UNPACKED_BYTES", "MAX_LOADED_BYTES", "MAX_BATCH_BYTES"), MEBIBYTE)
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


def repeated(count: int, size: int) -> pa.Table:
    """A table of `count` rows with the same text of `size` bytes."""
    return pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), ["x" * size])})


PARQUET_BOMBS: dict[str, tuple[pa.Table, dict[str, object], str]] = {
    "a dictionary": (repeated(60, 2**16), {}, TOO_LONG),
    "prefixes": (
        pa.table({"text": ["x" * 2**16] * 60}),
        {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"},
        TOO_LONG,
    ),
    "a page": (pa.table({"text": ["x" * 2**22]}), {"use_dictionary": False}, TOO_LONG),
    "row groups": (pa.concat_tables([repeated(16, 2**15)] * 40), {"row_group_size": 16}, TOO_LONG),
    "empty rows": (pa.table({"text": [""] * 20_000}), {}, "have more than "),
}


@pytest.mark.parametrize("name", PARQUET_BOMBS)
def test_a_parquet_bomb_is_a_bad_row(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, options, reason = PARQUET_BOMBS[name]
    sizes = [0]
    convert = parquet.as_bytes
    monkeypatch.setattr(parquet, "as_bytes", lambda batch, kind: [sizes.append(batch.nbytes), convert(batch, kind)][-1])
    path = tmp_path / "train-0.parquet"
    pq.write_table(table, path, compression="zstd", **options)
    assert path.stat().st_size < 2**14
    *good, bad = texts(path, "parquet", 2**20)
    assert bad.startswith("BAD ")
    assert reason in bad
    assert {len(text) for text in good} <= {2**15}
    source = open_source(SourceConfig("hf", path=str(tmp_path)))
    assert isinstance(source, StreamedSource)
    rows = [str(row.text)[-300:] for unit in source.row_groups() for row in source.rows(unit, 1, Share())]
    # A streamed source reads one row group after another: those that are good by themselves are good.
    assert (reason in rows[-1]) == (name != "row groups")
    assert max(sizes) < 1.1 * MEBIBYTE


def test_a_batch_of_rows_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in memory at once depends on the longest value that may repeat, and on nothing for other values."""
    asked: list[int] = []
    monkeypatch.setattr(parquet, "batch_rows", lambda column: [asked.append(batch_rows(column)), asked[-1]][-1])
    rows = [f"row {n} of the text" * (n % 50) for n in range(1500)]
    for version, packed in itertools.product(("1.0", "2.0"), ("none", "zstd")):
        for options in ({"use_dictionary": False}, {"write_page_checksum": True, "dictionary_pagesize_limit": 2**12}):
            path = tmp_path / "a.parquet"
            pq.write_table(pa.table({"n": [1] * 1500, "text": rows}), path, compression=packed, data_page_size=2**12,
                           data_page_version=version, **options)  # fmt: skip
            assert texts(path, "parquet", 2**20) == [row or "BAD the text is empty" for row in rows]
            assert set(asked) == {1024} if "use_dictionary" in options else 1 < min(asked) <= max(asked) < 1024
            asked.clear()


CHANGES = """
from pathlib import Path
from titanlite.data.sources.parquet import Parquet, BadRowError
from titanlite.data.sources.config import SourceConfig
file, bad = Path("a.parquet"), 0
content = file.read_bytes()
for place in range(len(content) - 8 - int.from_bytes(content[-8:-4], "little"), len(content) - 8):
    for value in (2, 6, 0x7E):
        file.write_bytes(content[:place] + bytes([value]) + content[place + 1 :])
        source = Parquet(SourceConfig("parquet", path=str(file)))
        for piece in source.scan(file, 0, 1000):
            try:
                source.read(file, piece)
            except BadRowError:
                bad += 1
print(bad)
"""


@pytest.mark.slow
def test_no_number_in_the_metadata_ends_the_process(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["one", "two"]}), tmp_path / "a.parquet")
    child = subprocess.run([sys.executable, "-c", CHANGES], capture_output=True, text=True, cwd=tmp_path)
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) > 50


def test_a_name_of_a_column_that_is_not_text_is_a_bad_file(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x"], "nnnn": ["y"]}), file, store_schema=False)
    file.write_bytes(file.read_bytes().replace(b"nnnn", b"n\xff\xffn"))
    with pytest.raises(BadRowError, match="not a readable Parquet file"), file.open("rb") as opened:
        parquet.open_parquet(opened)
