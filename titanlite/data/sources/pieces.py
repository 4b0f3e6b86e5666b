"""Pieces: documents, or parts of long documents. Their locations, text and tokens."""

import mmap
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt

STARTS_DOCUMENT = 1
ENDS_DOCUMENT = 2
BAD_FILE = 4
"""Flag of a piece that represents a file without rows, or the lost end of a corrupted file."""

_NOT_BLANK = re.compile(rb"\S")


class Piece(NamedTuple):
    """The location of a piece. All fields are integers; each kind of source defines the meaning of offset and size.

    row: line or row of the file, from 1, for messages. begin, length: the part of the row's text, in bytes of UTF-8;
    length -1: all of it. flags: STARTS_DOCUMENT, ENDS_DOCUMENT, BAD_FILE.
    """

    file: int
    row: int
    offset: int
    size: int
    begin: int = 0
    length: int = -1
    flags: int = STARTS_DOCUMENT | ENDS_DOCUMENT

    def parts(self, text: bytes, max_piece_bytes: int) -> Iterator["Piece"]:
        """Yield the pieces of this row. text: the row's text; empty text yields nothing."""
        for begin, end, flags in cut(text, 0, len(text), max_piece_bytes):
            yield self._replace(begin=begin, length=end - begin, flags=flags)


class BadRowError(Exception):
    """A bad row. The text is only the reason; the consumer applies data.on_bad_row."""


class FieldError(BadRowError):
    """The field of the text is missing or holds no text. texts: the fields that hold text."""

    def __init__(self, reason: str, texts: Sequence[str]) -> None:
        super().__init__(reason)
        self.texts = tuple(texts)


class KindError(BadRowError):
    """The row is not of the source's kind. kind: of a source that reads it."""

    def __init__(self, reason: str, kind: str) -> None:
        super().__init__(reason)
        self.kind = kind


class ConversationError(BadRowError):
    """The row is not a conversation, or has no turn that can be trained on."""


class LineEndError(BadRowError):
    """The lines of a file end with CR alone."""


class ArrayError(BadRowError):
    """The file holds one JSON array, not JSON lines."""


class PieceText(NamedTuple):
    """What is tokenized for a piece. flags: Piece.flags. text: or the error for the consumer to raise. document: reads
    the text of all pieces of its document. before, after: up to CONTEXT characters of the same document beside a part
    of it."""

    flags: int
    text: str | Exception
    document: Callable[[], Iterator[str | Exception]]
    before: str = ""
    after: str = ""


CONTEXT = 1024
"""Characters beside a part of a document that its tokens may depend on: the tokens are those of the entire document if
no word (text between two places where the tokenizer divides it) is longer."""


class TokenPiece(NamedTuple):
    """The tokens of a piece, 1-D. starts: the indices at which documents start. trained: for each token, whether it may
    be a target; None: all may."""

    tokens: npt.NDArray[np.integer]
    starts: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_] | None = None


class PieceEncoder(Protocol):
    """Tokenizes pieces. reads_context: whether the tokens of a part of a document are those of the entire document."""

    reads_context: bool

    def encode(self, pieces: Sequence[PieceText], locate: Callable[[int], str]) -> list[TokenPiece | Exception]:
        """Tokenize pieces in one batch. An exception in place of a text is returned unchanged.

        A text that cannot be encoded is a bad row. locate: file and row of the n-th of the pieces.
        """
        ...


BYTES_PER_TOKEN = 3
"""Approximate value for English and code; it only decides how far to read ahead."""
AT_BEGIN = np.zeros(1, np.int64)
EMPTY = np.empty(0, np.int64)
EMPTY_PIECE = TokenPiece(EMPTY, EMPTY)
"""A piece without tokens."""


class EpochSize(NamedTuple):
    """Tokens and sequences of an epoch. is_exact: whether they are counted, not estimated from a sample."""

    tokens: int
    sequences: float
    is_exact: bool


class Corpus(Protocol):
    """The numbered pieces of a source.

    count: number of pieces. size: in bytes of text or in tokens, see Source.size_unit. windows: whether each piece is
    one sequence; otherwise pieces are packed. description: one line for the log.
    """

    count: int
    size: int
    windows: bool
    description: str

    def prepare(self, pieces: Sequence[int]) -> None:
        """Fetch what windows that are needed soon consist of in the background, if it is in a store."""
        ...

    def ahead(self, pieces: Iterator[int], num_tokens: int) -> list[int]:
        """Take `pieces` until about `num_tokens` tokens, at least one piece, to fetch in one call."""
        ...

    def fetch(self, pieces: Sequence[int]) -> list[TokenPiece | Exception]:
        """The tokens of each piece, or the error for its consumer to raise: BadRowError, UserError."""
        ...

    def locate(self, piece: int) -> str:
        """File and row of a piece, for messages."""
        ...


class Place(NamedTuple):
    """The place of a piece in a stream; each StreamPieces defines the meaning of `position`."""

    epoch: int
    position: int


class StreamPieces(Protocol):
    """The pieces of one source that one stream reads, in order.

    windows: whether each piece is one sequence; otherwise pieces are packed. patience: number of consecutive pieces
    without a token to train on after which the stream raises an error. name: name of the source.
    """

    windows: bool
    patience: int
    name: str

    def first(self) -> Place:
        """The place of the stream's first piece."""
        ...

    def after(self, place: Place) -> Place:
        """The place of the next piece."""
        ...

    def has_ended(self, place: Place) -> bool:
        """Whether `place` is after the last piece of the last epoch."""
        ...

    def has(self, place: Place) -> bool:
        """Whether `place` is valid for this stream."""
        ...

    def epochs(self, place: Place) -> float:
        """The part of the source that this stream has read before `place`: the sum over all streams is in epochs."""
        ...

    def number(self, place: Place) -> int:
        """Number in the source of the piece at `place`; the pieces of one document have consecutive numbers."""
        ...

    def fetch(self, place: Place, num_tokens: int) -> TokenPiece | Exception:
        """The piece at `place`, or the error for its consumer to raise: BadRowError, UserError.

        num_tokens: approximate number of tokens needed from this piece on; later pieces may be prepared with it.
        """
        ...


class Bytes(Protocol):
    """Common interface of bytes and mmap."""

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> bytes: ...
    def find(self, sub: bytes, start: int, end: int, /) -> int: ...
    def rfind(self, sub: bytes, start: int, end: int, /) -> int: ...


def cut(data: Bytes, begin: int, end: int, max_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Cut the document data[begin:end] into parts (begin, end, flags) of at most `max_bytes`: after the last line end
    that fits, otherwise between characters. Invalid UTF-8 is cut, too, and raises when it is read."""
    flags = STARTS_DOCUMENT
    while end - begin > max_bytes:
        stop = data.rfind(b"\n", begin, begin + max_bytes) + 1
        if stop <= begin:
            stop = begin + max_bytes
            for back in range(4):
                if data[stop - back] & 0xC0 != 0x80:  # not a continuation byte: a character starts here
                    stop -= back
                    break
        yield begin, stop, flags
        begin, flags = stop, 0
    if begin < end:
        yield begin, end, flags | ENDS_DOCUMENT


def lines(data: Bytes, extent: tuple[int, int] | None = None) -> Iterator[tuple[int, int, int]]:
    """Yield (number from 1, begin, end) of each nonblank line, without its line end. Copies no data.

    extent: only the lines that begin in these bytes [begin, end), numbered from the first of them.
    """
    size = len(data)
    begin, stop_at = extent or (0, size)
    if begin:
        begin = data.find(b"\n", begin - 1, size) + 1 or size
    number = 1
    is_mapped = isinstance(data, bytes | mmap.mmap)
    while begin < stop_at:
        stop = data.find(b"\n", begin, size)
        stop = size if stop < 0 else stop
        if _NOT_BLANK.search(data, begin, stop) if is_mapped else data[begin:stop].strip():  # type: ignore[call-overload]
            yield number, begin, stop - (data[stop - 1] == 0x0D)
        begin, number = stop + 1, number + 1


def no_lines(size: int) -> BadRowError:
    """The error of a file without a nonblank line. size: its bytes or lines."""
    return BadRowError("the file has only blank lines" if size else "the file is empty")


def utf8_text(data: bytes) -> str:
    """Decode UTF-8. Raises BadRowError if the data is invalid, empty, or has NULs, as UTF-16 and binary data have."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRowError(f"invalid UTF-8 at byte {error.start}: {error.reason}") from None
    if (place := data.find(b"\0")) >= 0:
        raise BadRowError(f"a NUL character at byte {place}, which text does not have")
    if not text:
        raise BadRowError("the text is empty")
    return text
