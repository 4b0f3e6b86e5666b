"""Parquet files: a document is one row of a text column."""

import io
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import IO, Any

from titanlite.data.sources.base import TextSource, check_first_file
from titanlite.data.sources.config import CHAT, CONVERSATION_FIELDS, SourceConfig
from titanlite.data.sources.limits import (
    MAX_LOADED_BYTES,
    MAX_RATIO,
    MAX_UNPACKED_BYTES,
    ExpansionError,
    require_ratio,
    require_rows,
)
from titanlite.data.sources.parquet_pages import batch_rows
from titanlite.data.sources.pieces import BAD_FILE, BadRowError, FieldError, KindError, Piece, utf8_text
from titanlite.data.sources.seekable import SeekableReader
from titanlite.data.sources.stored import BLOCK_BYTES, SourceFile, StoredFile, open_file, size_of
from titanlite.runtime.cache import Recent
from titanlite.runtime.errors import Problem
from titanlite.runtime.retry import is_transient

CACHE_BYTES = 512 * 2**20
"""Memory for row groups: about the text of one block of the permutation, in which rows are read in random order."""

BUFFER_BYTES = 2**20

FOOTER_BYTES = 2**16
"""What Arrow reads first of a Parquet file: its end, with the metadata."""

TOO_LONG = (
    f"its text is more than {MAX_RATIO:,} times as long as its data; if you trust it, write it again without "
    'compression and dictionary: pyarrow.parquet.write_table(table, file, compression="none", use_dictionary=False)'
)

TEXT_TYPES = ("string", "large_string", "string_view")
"""Arrow types of a text column. The column may also be dictionary-encoded."""


class Parquet(TextSource):
    """A piece is a row (offset: row group, size: row within the group) and a part of its text (begin, length)."""

    kind = "parquet"
    keys = ("field",)
    suffixes = (".parquet",)
    row_name = "row"
    reads_stores = True
    shuffling_note = "shuffled row by row: each rank decodes all row groups"

    def __init__(self, config: SourceConfig) -> None:
        super().__init__(config)
        self.field = config.field or "text"
        self._row_groups: Recent[tuple[SourceFile, int], Any] = Recent(CACHE_BYTES, lambda column: int(column.nbytes))

    def check_content(self, key: str, *, vocab_size: int, needs_documents: bool) -> list[Problem]:  # noqa: ARG002
        return check_first_file(self, key, lambda opened: column_fault(opened, self.field))

    def settings(self) -> dict[str, Any]:
        return {"field": self.field}

    def scan(self, path: SourceFile, file: int, max_piece_bytes: int) -> Iterator[Piece]:
        try:
            with open_file(path) as opened:
                counts = row_counts(open_parquet(opened), size_of(path))
        except BadRowError:
            counts = []
        row = size = 0
        for group, row_count in enumerate(counts):
            texts: Iterable[Any] = repeat(None, row_count)
            try:
                loaded = _load(path, group, self.field)
                size += loaded.nbytes
                require_ratio(size, size_of(path), MAX_UNPACKED_BYTES, "its text")
                texts = loaded
            except BadRowError:  # read() raises it for each row
                pass
            except ExpansionError:  # the following row groups would take as long
                yield Piece(file, row + 1, group, 1, flags=BAD_FILE)
                return
            for place, value in enumerate(texts):
                row += 1
                text = None if value is None else value.as_py()
                uncut = Piece(file, row, group, place, 0, len(text or b""))
                if text is None or len(text) <= max_piece_bytes or not _is_utf8(text):
                    yield uncut
                else:
                    yield from uncut.parts(text, max_piece_bytes)
        if not row:
            yield Piece(file, 1, 0, 0, flags=BAD_FILE)

    def read(self, path: SourceFile, piece: Piece) -> str:
        if piece.flags & BAD_FILE:
            with open_file(path) as opened:
                row_counts(open_parquet(opened), size_of(path))  # raises the reason, if it is not an empty table
            raise _too_long(piece.offset) if piece.size else BadRowError("the file has no rows")
        group = piece.offset
        try:
            texts = self._row_groups.get((path, group), lambda: _load(path, group, self.field))
        except ExpansionError:
            raise _too_long(group) from None
        return text_of(piece, texts[piece.size], self.field)


def open_parquet(opened: IO[bytes]) -> Any:
    """Open a Parquet file for reading. Raises BadRowError if it is empty or not Parquet."""
    import pyarrow.parquet

    if not opened.seek(0, 2):
        raise BadRowError("the file is empty")
    try:
        return pyarrow.parquet.ParquetFile(opened, buffer_size=BUFFER_BYTES)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last one: of the name of a column
        raise damage(error, "not a readable Parquet file") from None


def row_counts(file: Any, packed_bytes: int) -> list[int]:
    """Number of rows of each row group of an open Parquet file. Raises BadRowError for too many for its bytes."""
    counts = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    if min(counts, default=0) < 0:
        raise BadRowError("a row group has a negative number of rows")
    try:
        require_rows(sum(counts), packed_bytes)
    except ExpansionError as error:
        raise BadRowError(f"the file is not read: {error}; divide its rows among several files") from None
    return counts


def _too_long(group: int) -> BadRowError:
    """The error of a row group whose text, with that of the row groups before it, is too long for its data."""
    return BadRowError(f"the file is not read from row group {group} on: {TOO_LONG}")


def text_of(piece: Piece, row: Any, field: str) -> str:
    """The text of a piece of a row, an Arrow scalar. Raises BadRowError."""
    if not row.is_valid:
        raise BadRowError(f"field {field!r} is null")
    return utf8_text(row.as_buffer()[piece.begin : piece.begin + piece.length].to_pybytes())


def _load(path: SourceFile, group: int, field: str) -> Any:
    """A row group's text column as a chunked array of bytes.

    Raises BadRowError if it is missing, unreadable or not text, and ExpansionError if it is too long for its data.
    """
    import pyarrow

    cached = _footer(path) if isinstance(path, StoredFile) else []
    with path.open(cached) if isinstance(path, StoredFile) else open_file(path) as opened:
        try:
            batches = list(read_batches(opened, open_parquet(opened), group, field, cached))
        except (pyarrow.ArrowException, OSError) as error:
            raise damage(error, f"row group {group} cannot be read") from None
    return pyarrow.chunked_array(batches, pyarrow.large_binary())


def read_batches(
    opened: IO[bytes], file: Any, group: int, field: str, cached: list[tuple[int, int]] | None = None
) -> Iterator[Any]:
    """Yield arrays of bytes: the text of consecutive rows of a row group of a Parquet file, and the open file of it.

    cached: where to add the ranges that are read. Raises BadRowError, ExpansionError, and errors of pyarrow for damaged
    data.
    """
    kind, rows, size = text_type(file.schema_arrow, field), 0, 0
    part = _Part(opened.seek(0, io.SEEK_END))
    try:
        next(part.batches(file, 1, group, field), None)
    except _NeededError as needed:
        begin, end = needed.begin, needed.end
        if cached is not None:
            cached += [(first, min(end, first + BLOCK_BYTES)) for first in range(begin, end, BLOCK_BYTES)]
        opened.seek(begin)
        part.begin, part.data = begin, opened.read(end - begin)
        if len(part.data) != end - begin:
            raise OSError("the file became shorter after it was opened") from None
    for batch in part.batches(file, batch_rows(part.data), group, field):
        texts = as_bytes(batch.column(0), kind)
        rows += len(texts)
        size += texts.nbytes
        require_ratio(size, len(part.data), MAX_LOADED_BYTES, "its text")
        yield texts
    stated = file.metadata.row_group(group).num_rows
    if rows != stated:
        raise BadRowError(f"row group {group} has {rows:,} rows, not {stated:,} as its metadata state")


class _NeededError(Exception):
    """pyarrow reads the bytes [begin, end) of a file."""

    def __init__(self, begin: int, end: int) -> None:
        super().__init__(begin, end)
        self.begin, self.end = begin, end


class _Part(SeekableReader):
    """A Parquet file of `size` bytes, of which there are only `data`, from byte `begin` on.

    With it, pyarrow tells which bytes a column has: to ask its metadata can abort the interpreter for a damaged file.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.begin, self.data = 0, b""

    def batches(self, file: Any, rows: int, group: int, field: str) -> Iterator[Any]:
        """The text column of a row group in batches of `rows`. file: the open Parquet file. Raises _NeededError."""
        import pyarrow.parquet

        reader = pyarrow.parquet.ParquetFile(self, metadata=file.metadata)
        # Without threads: threads that read Python file objects can outlive the interpreter and crash it.
        yield from reader.iter_batches(rows, row_groups=[group], columns=[field], use_threads=False)

    def read(self, size: int = -1, /) -> bytes:
        begin = self.position - self.begin
        if begin < 0 or begin + size > len(self.data):
            raise _NeededError(self.position, self.position + size)
        self.position += size
        return self.data[begin : begin + size]


def _footer(file: StoredFile) -> list[tuple[int, int]]:
    """The ranges of a Parquet file in which Arrow reads the metadata."""
    size = file.facts.bytes
    if size < FOOTER_BYTES:
        return [(0, size)] if size else []
    begin = size - FOOTER_BYTES
    length = 8 + int.from_bytes(file.range(begin, size)[FOOTER_BYTES - 8 : FOOTER_BYTES - 4], "little")
    return [(begin, size), *([(size - length, begin)] if begin > size - length >= 0 else [])]


def text_type(schema: Any, field: str) -> Any:
    """The Arrow type of a text column's values. Raises BadRowError if the column is missing or not text."""
    if schema.names.count(field) != 1:
        fault = "not unique" if field in schema.names else "missing"
        present = ", ".join(map(repr, schema.names[:8]))
        fault = f"field {field!r} is {fault}; the file has {present}"
        if any(_is_list(column.type) for column in schema if column.name in CONVERSATION_FIELDS):
            raise KindError(fault, CHAT)
        raise FieldError(fault, _texts(schema))
    kind = schema.field(field).type
    value_kind = _value_type(kind)
    if str(value_kind) not in TEXT_TYPES:
        raise FieldError(f"field {field!r} is not text but {kind}", _texts(schema))
    return value_kind


def _value_type(kind: Any) -> Any:
    """The type of the values of a column, which may be dictionary-encoded."""
    import pyarrow

    return kind.value_type if pyarrow.types.is_dictionary(kind) else kind


def _is_list(kind: Any) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind))


def _texts(schema: Any) -> list[str]:
    """The columns of text with a unique name."""
    texts = [column.name for column in schema if str(_value_type(column.type)) in TEXT_TYPES]
    return [name for name in texts if schema.names.count(name) == 1]


def column_fault(opened: IO[bytes], field: str) -> BadRowError | None:
    """The fault of the text column of an open file; None also if the file cannot be read as Parquet."""
    try:
        schema = open_parquet(opened).schema_arrow
    except (BadRowError, OSError):
        return None
    try:
        text_type(schema, field)
    except BadRowError as bad:
        return bad
    return None


def as_bytes(column: Any, value_kind: Any) -> Any:
    """Convert a text column (array or chunked array) to bytes, which may be invalid UTF-8."""
    import pyarrow

    return column.cast(value_kind).cast(pyarrow.large_binary())


def damage(error: Exception, fault: str) -> BadRowError:
    """The BadRowError for data that Arrow cannot read. Raises `error` if it comes from the system or a connection."""
    if isinstance(error, BadRowError):
        return error
    if is_transient(error) or getattr(error, "errno", None) is not None:
        raise error
    return BadRowError(f"{fault}: {error}")


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
