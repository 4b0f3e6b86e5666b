"""Readers of CSV and Arrow: the rows, their text, and the reasons of bad rows."""

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.unit.data.test_readers import COMPLETE, read_all
from titanlite.data.kinds import open_source
from titanlite.data.sources.base import TextSource
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.tables import Arrow, Csv

CSV = """id,text
1,one
2,"two ""quoted""
lines"

3,"zwei €, öö"
"""


def csv(field: str = "text") -> Csv:
    return Csv(SourceConfig("csv", field=field))


def arrow(field: str = "text") -> Arrow:
    return Arrow(SourceConfig("arrow", field=field))


def texts(reader: TextSource, path: Path, max_piece_bytes: int = 1000) -> list[str]:
    """The text or the reason of each piece; pieces are numbered by row."""
    return [text for _, text, _ in read_all(reader, path, max_piece_bytes)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rows.csv"


def test_csv_rows_may_have_line_ends_quotes_and_a_byte_order_mark(file: Path) -> None:
    expected = [(1, "one", COMPLETE), (2, 'two "quoted"\nlines', COMPLETE), (3, "zwei €, öö", COMPLETE)]
    file.write_text(CSV)
    assert read_all(csv(), file) == expected
    file.write_text(CSV.replace("id,text", "text,id").replace("\n1,one", "\none,1"), "utf-8-sig")
    assert texts(csv(), file)[0] == "one"
    packed = file.with_name("rows.csv.gz")
    packed.write_bytes(gzip.compress(CSV.replace("\n", "\r\n").encode()))
    assert texts(csv(), packed) == ["one", 'two "quoted"\r\nlines', "zwei €, öö"]
    assert texts(csv("id"), packed) == ["1", "2", "3"]


def test_a_long_csv_row_is_cut(file: Path) -> None:
    long = "words\n" * 100_000
    file.write_text(f'text\n"{long}"\nend\n')
    found = texts(csv(), file, 600)
    assert "".join(found) == long + "end"
    assert len(found) == 1001


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b'"a" b,2', "invalid CSV at line 3: ',' expected after '\"'"),
        (b"a,2,3", "the row that ends at line 3 has 3 values, but the header has 2"),
        (b"a", "the row that ends at line 3 has 1 values, but the header has 2"),
        (b"caf\xe9,2", "field 'text' has an unpaired surrogate, \\udce9, at character 3"),
        (b",2", "the text is empty"),
    ],
)
def test_bad_csv_rows(row: bytes, reason: str, file: Path) -> None:
    file.write_bytes(b"text,id\ngood,1\n" + row + b"\nlast,3\n")
    for size in (16, 1000):
        assert read_all(csv(), file, size) == [
            *((1, "good", COMPLETE), (2, f"BAD {reason}", COMPLETE), (3, "last", COMPLETE))
        ]


@pytest.mark.slow
def test_damaged_csv(file: Path) -> None:
    file.write_text('text\ngood\n"no end\n')
    assert texts(csv(), file) == ["good", "BAD invalid CSV at line 3: unexpected end of data"]
    file.write_text("")
    assert texts(csv(), file.rename(file.with_name("empty.csv"))) == ["BAD the file is empty"]
    packed = file.with_name("rows.csv.gz")
    packed.write_bytes(gzip.compress(("text\n" + "good\n" * 20000).encode())[:-8])
    found = texts(csv(), packed)
    assert found[-1].startswith(f"BAD the file is damaged after row {len(found) - 1}: Compressed file ended")


def write_stream(table: pa.Table, path: Path, new: Any = pa.ipc.new_stream) -> None:
    with new(str(path), table.schema) as out:
        out.write_table(table, 2)


@pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file])
def test_arrow(new: Any, tmp_path: Path) -> None:
    rows = ["one", "zwei\n€", None, "", "long " * 10]
    path = tmp_path / "rows.arrow"
    table = pa.table({"text": rows, "id": range(5), "large": pa.array(rows, pa.large_string())})
    write_stream(table.append_column("category", table["text"].dictionary_encode()), path, new)
    for field in ("text", "large", "category"):
        expected = ["one", "zwei\n€", f"BAD field '{field}' is not text but null", "BAD the text is empty"]
        assert texts(arrow(field), path) == [*expected, "long " * 10]
        assert "".join(texts(arrow(field), path, 16)[4:]) == "long " * 10
    assert texts(arrow("id"), path) == ["BAD field 'id' is not text but int64"]
    path.write_bytes(path.read_bytes()[:-300])
    damaged = texts(arrow(), path)
    assert damaged[-1].startswith(f"BAD the file is damaged after row {len(damaged) - 1}: ")


def test_invalid_utf8_in_arrow(tmp_path: Path) -> None:
    text = pa.array([b"good", b"caf\xe9"], pa.binary()).view(pa.string())
    write_stream(pa.table({"text": text}), tmp_path / "rows.arrow")
    found = texts(arrow(), tmp_path / "rows.arrow")
    assert found == ["good", "BAD field 'text' has an unpaired surrogate, \\udce9, at character 3"]


@pytest.mark.parametrize("kind", ["csv", "arrow"])
def test_a_missing_column_is_found_before_the_start(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{kind}"
    if kind == "csv":
        path.write_text("id,content,note\n1,words,x\n")
    else:
        write_stream(pa.table({"content": ["words"], "id": [1]}), path)

    def problems(**settings: Any) -> list[str]:
        source = open_source(SourceConfig(kind, path=str(path), **settings))
        found = source.check_content("data.sources.0", vocab_size=300, needs_documents=False)
        return [f"{problem.key}: {problem.remedy}" for problem in found]

    (problem,) = problems()
    assert problem.startswith(f"data.sources.0.field: {path}: field 'text' is missing; the ")
    assert 'write field = "content", or add --data.sources.0.field content' in problem
    assert problems(field="content") == []
