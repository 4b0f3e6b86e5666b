"""Pieces: documents, or parts of long ones. Where they lie, their text, their tokens."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

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


class TokenPiece(NamedTuple):
    """A piece as tokens, 1-D. starts: the places in it at which a document starts."""

    tokens: npt.NDArray[np.integer]
    starts: npt.NDArray[np.int64]


AT_BEGIN = np.zeros(1, np.int64)
NOWHERE = np.empty(0, np.int64)
NOTHING = TokenPiece(NOWHERE, NOWHERE)
"""A piece without tokens."""


class Corpus(Protocol):
    """The numbered pieces of a source.

    count: how many. size: in bytes of text or in tokens, see size_unit. windows: whether each piece is one sequence;
    else pieces are packed. description: what there is, in one line.
    """

    count: int
    size: int
    windows: bool
    description: str

    def ahead(self, pieces: Iterator[int], num_tokens: int) -> list[int]:
        """Those of the next `pieces` (at least 1) that are worth fetching at once for about `num_tokens` tokens."""
        ...

    def fetch(self, pieces: Sequence[int]) -> list[TokenPiece | Exception]:
        """For each piece its tokens, or what is to be raised by whoever consumes it: BadRowError, UserError."""
        ...


class Place(NamedTuple):
    """Where a stream stands among its pieces of a source; what `position` counts is the source's own business."""

    epoch: int
    position: int


class StreamPieces(Protocol):
    """The pieces of one source that one stream reads, in its order.

    windows: whether each is one sequence; else they are packed. patience: so many pieces in a row without any token
    mean that there are none to come. name: of the source.
    """

    windows: bool
    patience: int
    name: str

    def first(self) -> Place:
        """Where the stream begins."""
        ...

    def after(self, place: Place) -> Place:
        """The place of the next piece."""
        ...

    def has_ended(self, place: Place) -> bool:
        """Whether there is no piece at the place: the source has been read as often as it is to be."""
        ...

    def has(self, place: Place) -> bool:
        """Whether a stream can stand there."""
        ...

    def number(self, place: Place) -> int:
        """Which piece of the source is at the place; parts of one document have numbers in a row."""
        ...

    def fetch(self, place: Place, num_tokens: int) -> TokenPiece | Exception:
        """The piece, or what is to be raised by whoever consumes it: BadRowError, UserError.

        num_tokens: about so many are needed at once, from this piece on: those after it may be prepared with it.
        """
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
