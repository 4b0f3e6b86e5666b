"""JSON lines: a document is the text in one field of one line's object."""

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from titanlite.data.pieces import BAD_FILE, BadRowError, Piece, cut, flags_of, lines, read_range, utf8_text
from titanlite.data.recent import Recent
from titanlite.data.unpack import Unpacked, is_gzip, unpacked

CACHE_BYTES = 64 * 2**20
"""Texts of cut rows that stay in memory, so that a long row is not parsed for each of its pieces."""

BYTE_ORDER_MARK = "\ufeff"
"""What some programs put before the first line; it is no part of the JSON."""


class JsonlReader:
    """Pieces are a line (offset, size) and a part of its decoded text (begin, length).

    A gzip file is read as what it unpacks to; where that is damaged, one more bad row stands behind the whole lines.
    """

    row_name: ClassVar[str] = "line"

    def __init__(self, field: str) -> None:
        self.field = field
        self._cut_texts: Recent[tuple[Path, int], bytes] = Recent(CACHE_BYTES, len)
        self._unpacked: dict[Path, Unpacked] = {}

    def scan(self, path: Path, file: int, max_piece_bytes: int) -> Iterator[Piece]:
        content = self._content(path)
        if content.file.stat().st_size:
            yield from self._scan(content.file, file, max_piece_bytes, can_be_blank=bool(content.damage))
        elif not content.damage:
            yield Piece(file, 1, 0, 0, flags=BAD_FILE)
        if content.damage:
            yield Piece(file, content.lines + 1, 0, 0, flags=BAD_FILE)

    def _content(self, path: Path) -> Unpacked:
        """The lines of a file: its own, or those that it unpacks to."""
        if not is_gzip(path.name):
            return Unpacked(path, 0, "")
        if path not in self._unpacked:
            self._unpacked[path] = unpacked(path)
        return self._unpacked[path]

    def _scan(self, path: Path, file: int, max_piece_bytes: int, *, can_be_blank: bool) -> Iterator[Piece]:
        with open(path, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = False
            for number, begin, end in lines(data):
                found = True
                # Text is never longer than its JSON form, so that a short line need not be parsed to be one piece.
                if end - begin <= max_piece_bytes:
                    yield Piece(file, number, begin, end - begin)
                else:
                    yield from self._parts(Piece(file, number, begin, end - begin), data[begin:end], max_piece_bytes)
            if not found and not can_be_blank:
                yield Piece(file, 1, 0, len(data), flags=BAD_FILE)

    def _parts(self, row: Piece, line: bytes, max_piece_bytes: int) -> Iterator[Piece]:
        try:
            text = json_text(line, self.field)
        except BadRowError:
            yield row  # found again, and said, by whoever reads it
            return
        for begin, end in cut(text, 0, len(text), max_piece_bytes):
            yield row._replace(begin=begin, length=end - begin, flags=flags_of(begin, end, 0, len(text)))

    def read(self, path: Path, piece: Piece) -> str:
        content = self._content(path)
        if piece.flags & BAD_FILE and content.damage:
            raise BadRowError(content.damage)
        if piece.flags & BAD_FILE:
            raise BadRowError("the file is empty" if piece.size == 0 else "the file has only blank lines")
        if piece.length < 0:
            return utf8_text(self._read_text(content.file, piece))
        text = self._cut_texts.get((path, piece.offset), lambda: self._read_text(content.file, piece))
        return utf8_text(text[piece.begin : piece.begin + piece.length])

    def _read_text(self, path: Path, piece: Piece) -> bytes:
        return json_text(read_range(path, piece.offset, piece.size), self.field)


def json_text(line: bytes, field: str) -> bytes:
    """The text, in UTF-8, of one field of the object that a line holds. Raises BadRowError."""
    row = _parse(line)
    if not isinstance(row, dict):
        raise BadRowError(f"not a JSON object but {_json_type(row)}")
    if field not in row:
        present = ", ".join(repr(name) for name in list(row)[:8]) or "nothing"
        raise BadRowError(f"field {field!r} is missing; there is {present}")
    text = row[field]
    if not isinstance(text, str):
        raise BadRowError(f"field {field!r} is not text but {_json_type(text)}")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRowError(
            f"field {field!r} has half a surrogate pair, \\u{ord(text[error.start]):04x}, at character {error.start}"
        ) from None


def _parse(line: bytes) -> Any:
    try:
        return json.loads(utf8_text(line).removeprefix(BYTE_ORDER_MARK))
    except json.JSONDecodeError as error:
        raise BadRowError(f"invalid JSON at character {error.pos}: {error.msg}") from None
    except (RecursionError, ValueError) as error:  # nested too deeply; a number with too many digits
        raise BadRowError(f"invalid JSON: {error}") from None


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
