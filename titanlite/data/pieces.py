"""Pieces: documents, or parts of long ones, as the rows of an index."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

STARTS_DOCUMENT = 1
ENDS_DOCUMENT = 2
BAD_FILE = 4
"""Flag of the one piece that stands for a file without any row, or for what is lost at the end of a damaged one."""

_NOT_BLANK = re.compile(rb"\S")


class Piece(NamedTuple):
    """Where a piece lies. All integers; what offset and size count is the reader's own business.

    row: line or row of the file, from 1, for messages. begin, length: the part of the row's text, in bytes of UTF-8;
    length -1 is the whole. flags: STARTS_DOCUMENT, ENDS_DOCUMENT, BAD_FILE.
    """

    file: int
    row: int
    offset: int
    size: int
    begin: int = 0
    length: int = -1
    flags: int = STARTS_DOCUMENT | ENDS_DOCUMENT


class BadRowError(Exception):
    """A row that cannot be used; the text is the reason alone. The reader does not know what is done about it."""


class Reader(Protocol):
    """How one kind of file is cut into pieces and how a piece becomes text."""

    row_name: ClassVar[str]
    """What a row is called in messages: "line" or "row"."""

    def scan(self, path: Path, file: int, max_piece_bytes: int) -> Iterator[Piece]:
        """All pieces of a file in order; at least one, a BAD_FILE where there is no row. Holds no file in memory."""
        ...

    def read(self, path: Path, piece: Piece) -> str:
        """The piece's text, never empty. Raises BadRowError, and OSError where the file cannot be read."""
        ...


class Bytes(Protocol):
    """What bytes and a memory map have in common."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> int: ...
    def find(self, sub: bytes, start: int, end: int, /) -> int: ...
    def rfind(self, sub: bytes, start: int, end: int, /) -> int: ...


def cut(data: Bytes, begin: int, end: int, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Parts (begin, end) of at most `max_bytes` of data[begin:end]: after the last line end that fits, else before the
    last character that does not. Text that is not UTF-8 is cut as well; whoever reads it finds out."""
    while end - begin > max_bytes:
        stop = data.rfind(b"\n", begin, begin + max_bytes) + 1
        if stop <= begin:
            stop = begin + max_bytes
            for back in range(4):
                if data[stop - back] & 0xC0 != 0x80:  # not a continuation byte: a character starts here
                    stop -= back
                    break
        yield begin, stop
        begin = stop
    if begin < end:
        yield begin, end


def flags_of(begin: int, end: int, document_begin: int, document_end: int) -> int:
    """STARTS_DOCUMENT and ENDS_DOCUMENT of the part (begin, end) of a document."""
    return STARTS_DOCUMENT * (begin == document_begin) | ENDS_DOCUMENT * (end == document_end)


def lines(data: Bytes) -> Iterator[tuple[int, int, int]]:
    """(number from 1, begin, end) of each line that is not blank, without its line end. Nothing is copied."""
    begin, number, size = 0, 1, len(data)
    while begin < size:
        stop = data.find(b"\n", begin, size)
        stop = size if stop < 0 else stop
        if _NOT_BLANK.search(data, begin, stop):  # type: ignore[call-overload]
            yield number, begin, stop - (data[stop - 1] == 0x0D)
        begin, number = stop + 1, number + 1


def utf8_text(data: bytes) -> str:
    """The text, not empty. Raises BadRowError."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRowError(f"invalid UTF-8 at byte {error.start}: {error.reason}") from None
    if not text:
        raise BadRowError("the text is empty")
    return text


def read_range(path: Path, offset: int, size: int) -> bytes:
    """Exactly these bytes of a file. Raises OSError where it is shorter."""
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read(size)
    if len(data) != size:
        raise OSError("the file became shorter after it was indexed")
    return data
