import random
from pathlib import Path

import pytest

from titanlite.data.sources.pieces import ENDS_DOCUMENT, STARTS_DOCUMENT, BadRowError, cut, lines, read_range, utf8_text


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
