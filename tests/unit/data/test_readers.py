"""Readers of text, JSON Lines and Parquet: the pieces, their text, and the reasons of bad rows."""

import errno
import gzip
import io
import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from titanlite.data.sources.base import TextSource
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.jsonl import Jsonl, is_damage, open_lines
from titanlite.data.sources.parquet import Parquet
from titanlite.data.sources.pieces import ENDS_DOCUMENT, STARTS_DOCUMENT, BadRowError
from titanlite.data.sources.text import Text

COMPLETE = STARTS_DOCUMENT | ENDS_DOCUMENT


def text(document: str) -> Text:
    return Text(SourceConfig("text", document=document))  # type: ignore[arg-type]


def jsonl(field: str) -> Jsonl:
    return Jsonl(SourceConfig("jsonl", field=field))


def parquet(field: str) -> Parquet:
    return Parquet(SourceConfig("parquet", field=field))


def read_all(reader: TextSource, path: Path, max_piece_bytes: int = 1000) -> list[tuple[int, str, int]]:
    """(row, text or reason, flags) of each piece."""
    result = []
    for piece in reader.scan(path, 0, max_piece_bytes):
        try:
            text = reader.read(path, piece)
        except BadRowError as bad:
            text = f"BAD {bad}"
        result.append((piece.row, text, piece.flags))
    return result


ROWS = b"\none\ntwo\r\n \n\nthree\n\nfour"
LONG = "ääääääääää\nöööööööööö\nend"


@pytest.mark.parametrize(
    ("reader", "content", "expected"),
    [
        (text("file"), ROWS, [(1, ROWS.decode(), COMPLETE)]),
        (text("paragraph"), ROWS, [(2, "one\ntwo", COMPLETE), (6, "three", COMPLETE), (8, "four", COMPLETE)]),
        (text("line"), ROWS, [(n, word, COMPLETE) for n, word in ((2, "one"), (3, "two"), (6, "three"), (8, "four"))]),
        (jsonl("text"), b'\xef\xbb\xbf{"text": "1"}\r\n\r\n{"text": "\\u20ac\\n", "more": [1]}\r', [
            *((1, "1", COMPLETE), (3, "€\n", COMPLETE))]),
        (jsonl("body"), b'{"body": "x", "text": "y"}', [(1, "x", COMPLETE)]),
    ],
)  # fmt: skip
def test_rows_are_numbered_by_lines(
    reader: TextSource, content: bytes, expected: list[tuple[int, str, int]], tmp_path: Path
) -> None:
    """Blank lines are counted and skipped, as is a byte order mark."""
    (tmp_path / "rows").write_bytes(content)
    assert read_all(reader, tmp_path / "rows") == expected


@pytest.mark.parametrize("is_jsonl", [False, True])
def test_long_text_is_cut_at_line_ends(is_jsonl: bool, tmp_path: Path) -> None:
    """That of JSON after decoding: all pieces have the number of their line."""
    content = json.dumps({"text": LONG}) + '\n{"text": "short"}' if is_jsonl else LONG
    (tmp_path / "long").write_text(content)
    numbers = (1, 1, 1) if is_jsonl else (1, 2, 3)
    flags = (STARTS_DOCUMENT, 0, ENDS_DOCUMENT)
    expected = [*zip(numbers, LONG.splitlines(keepends=True), flags, strict=True)]
    found = read_all(jsonl("text") if is_jsonl else text("file"), tmp_path / "long", 22)
    assert found == [*expected, *[(2, "short", COMPLETE)] * is_jsonl]


def test_only_the_piece_that_is_not_utf8_is_bad(tmp_path: Path) -> None:
    file = tmp_path / "broken.txt"
    file.write_bytes(b"first line here\nbroken \xff line\nlast line here\n")
    rows = read_all(text("file"), file, 16)
    assert [text for _, text, _ in rows] == [
        "first line here\n",
        "BAD invalid UTF-8 at byte 7: invalid start byte",
        "last line here\n",
    ]


@pytest.mark.parametrize("reader", [text("file"), text("line"), jsonl("text"), parquet("text")])
def test_an_empty_file_is_one_bad_row(reader: TextSource, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert [(row, text) for row, text, _ in read_all(reader, tmp_path / "empty")] == [(1, "BAD the file is empty")]


@pytest.mark.parametrize("reader", [text("paragraph"), text("line"), jsonl("text")])
def test_a_file_of_blank_lines_is_one_bad_row(reader: TextSource, tmp_path: Path) -> None:
    (tmp_path / "blank").write_text("\n \n\n")
    assert [text for _, text, _ in read_all(reader, tmp_path / "blank")] == ["BAD the file has only blank lines"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b'{"text": "open', "invalid JSON at character 9: Unterminated string"),
        (b'{"text": "\xff"}', "invalid UTF-8 at byte 10"),
        (b'["text"]', "not a JSON object but an array"),
        (b"null", "not a JSON object but null"),
        (b'{"body": "x"}', "field 'text' is missing; the row has 'body'"),
        (b"{}", "field 'text' is missing; the row has no field"),
        (b'{"text": 1.5}', "field 'text' is not text but a number"),
        (b'{"text": null}', "field 'text' is not text but null"),
        (b'{"text": true}', "field 'text' is not text but a boolean"),
        (b'{"text": ["x"]}', "field 'text' is not text but an array"),
        (b'{"text": ""}', "the text is empty"),
        (b'{"text": "ab\\ud800"}', "an unpaired surrogate, \\ud800, at character 2"),
        (b'{"text": ' + b"[" * 200_000, "invalid JSON"),
        (b'{"text": ' + b"1" * 10_000 + b"}", "invalid JSON"),
    ],
)
@pytest.mark.parametrize("max_piece_bytes", [16, 10**6])
def test_bad_jsonl_rows(row: bytes, reason: str, max_piece_bytes: int, write_jsonl: Callable[..., Path]) -> None:
    file = write_jsonl(["good", row, "good"])
    rows = read_all(jsonl("text"), file, max_piece_bytes)
    assert [number for number, _, _ in rows] == [1, 2, 3]
    assert rows[1][1].startswith("BAD ")
    assert reason in rows[1][1]
    assert (rows[0][1], rows[2][1]) == ("good", "good")


def gz_of(file: Path) -> Path:
    """Write a gzip file of two members next to `file`, and return its path."""
    return packed_by(gzip.compress, ".gz", file)


def zst_of(file: Path) -> Path:
    """Write a file of two zstd frames next to `file`, and return its path."""
    return packed_by(partial(pa.compress, codec="zstd", asbytes=True), ".zst", file)


def packed_by(pack: Callable[[bytes], bytes], suffix: str, file: Path) -> Path:
    data, packed = file.read_bytes(), file.with_name(file.name + suffix)
    packed.write_bytes(pack(data[:20]) + pack(data[20:]))
    return packed


@pytest.mark.parametrize("pack", [gz_of, zst_of])
def test_compressed_jsonl_reads_like_unpacked_jsonl(
    pack: Callable[[Path], Path], write_jsonl: Callable[..., Path], caplog: pytest.LogCaptureFixture, cache: Path
) -> None:
    file = write_jsonl(["one", b"", "zwei\n€" * 10, b"{", "last"])
    with caplog.at_level(logging.INFO, "titanlite"):
        packed = pack(file)
        assert read_all(jsonl("text"), packed, 16) == read_all(jsonl("text"), file, 16)
        reader = jsonl("text")
        assert read_all(reader, packed, 100) == read_all(jsonl("text"), file, 100)
    (line,) = caplog.messages  # unpacked once
    assert f"unpacked {packed} (0.0 MiB) into {cache}" in line
    for rest in (cache / "unpacked").rglob("content"):
        rest.unlink()
    with pytest.raises(OSError, match="content"):
        read_all(reader, packed)


def test_damaged_unpacked_data_is_unpacked_again(
    write_jsonl: Callable[..., Path], caplog: pytest.LogCaptureFixture, cache: Path
) -> None:
    packed = gz_of(write_jsonl(["the first text", "the second text"]))
    before = read_all(jsonl("text"), packed)
    (content,) = (cache / "unpacked").rglob("content")
    content.write_bytes(content.read_bytes().replace(b"first", b"worst"))
    assert read_all(jsonl("text"), packed) == before
    assert f"the unpacked {packed} in {content.parent} is damaged and is built again" in caplog.text


@pytest.mark.parametrize(("pack", "kind", "kept"), [(gz_of, "gzip", 0.5), (zst_of, "zstd", 0.75)])
@pytest.mark.parametrize("lines", [1, 5000])
def test_damaged_compressed_data_is_one_bad_row_after_complete_lines(
    pack: Callable[[Path], Path], kind: str, kept: float, lines: int, write_jsonl: Callable[..., Path]
) -> None:
    expected = [f"the text of row {n}, {n**9}" for n in range(lines)]
    packed = pack(write_jsonl(expected))
    content = packed.read_bytes()
    packed.write_bytes(content[: int(len(content) * kept)])
    *found, last = read_all(jsonl("text"), packed)
    assert last == (len(found) + 1, f"BAD the {kind} data ends early after line {len(found)}", COMPLETE ^ 7)
    assert found == [(n + 1, text, COMPLETE) for n, text in enumerate(expected[: len(found)])]
    assert len(found) >= lines // 4
    size = {"gzip": 8, "zstd": 20}[kind]  # of gzip, all lines are complete, and only the checksum is wrong
    packed.write_bytes(content[:-size] + bytes(size))
    *found, last = read_all(jsonl("text"), packed)
    assert last[1].startswith(f"BAD the {kind} data is corrupt (")
    assert kind == "zstd" or [text for _, text, _ in found] == expected


def test_gzip_data_that_ends_within_its_header_is_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b"{}")[:5])
    (row,) = read_all(jsonl("text"), tmp_path / "rows.jsonl.gz")
    assert row == (1, "BAD the gzip data ends early after line 0", COMPLETE ^ 7)


def test_a_read_error_of_compressed_data_is_not_damage() -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:  # noqa: ARG002
            raise OSError(errno.EIO, "Input/output error")

    for name in ("rows.jsonl.gz", "rows.jsonl.zst"):
        with open_lines(Failing(), name) as lines, pytest.raises(OSError, match="Input/output") as raised:
            lines.read()
        assert not is_damage(raised.value)


def test_an_operating_system_error_is_not_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"text": ["one"]}), tmp_path / "rows.parquet")
    (piece,) = parquet("text").scan(tmp_path / "rows.parquet", 0, 100)

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", fail)
    with pytest.raises(OSError, match="Input/output error"):
        parquet("text").read(tmp_path / "rows.parquet", piece)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_parquet_rows(kind: pa.DataType, tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    texts = ["one", None, "", "long line one\nlong line two\n", "fünf"]
    pq.write_table(pa.table({"text": pa.array(texts).cast(kind), "n": range(5)}), file, row_group_size=2)
    assert read_all(parquet("text"), file, 20) == [
        (1, "one", COMPLETE),
        (2, "BAD field 'text' is null", COMPLETE),
        (3, "BAD the text is empty", COMPLETE),
        (4, "long line one\n", STARTS_DOCUMENT),
        (4, "long line two\n", ENDS_DOCUMENT),
        (5, "fünf", COMPLETE),
    ]


def test_parquet_text_that_is_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    broken = pa.Array.from_buffers(pa.string(), 1, pa.array([b"a" * 30 + b"\xff"], pa.binary()).buffers())
    pq.write_table(pa.table({"text": broken}), file)
    assert [text for _, text, _ in read_all(parquet("text"), file, 16)] == [
        "BAD invalid UTF-8 at byte 30: invalid start byte"
    ]


def test_parquet_without_the_field_or_with_another_type(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"n": [1, 2]}), file)
    missing = "BAD field 'text' is missing; the file has 'n'"
    assert read_all(parquet("text"), file) == [(1, missing, COMPLETE), (2, missing, COMPLETE)]
    assert read_all(parquet("n"), file)[0] == (1, "BAD field 'n' is not text but int64", COMPLETE)
    pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), file)
    twice = "BAD field 'text' is not unique; the file has 'text', 'text'"
    assert read_all(parquet("text"), file) == [(1, twice, COMPLETE)]


def test_invalid_parquet_and_parquet_without_rows(tmp_path: Path) -> None:
    (tmp_path / "broken").write_bytes(b"PAR1 but not really")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "no_rows")
    (broken,) = read_all(parquet("text"), tmp_path / "broken")
    (no_rows,) = read_all(parquet("text"), tmp_path / "no_rows")
    assert broken[1].startswith("BAD not a readable Parquet file: ")
    assert no_rows[1] == "BAD the file has no rows"
