"""Parquet files: a document is one row of a text column."""

from collections.abc import Iterator
from typing import IO, Any

from titanlite.data.sources.base import TextSource, check_first_file
from titanlite.data.sources.config import CHAT, CONVERSATION_FIELDS, SourceConfig
from titanlite.data.sources.pieces import BAD_FILE, BadRowError, FieldError, KindError, Piece, utf8_text
from titanlite.data.sources.stored import BLOCK_BYTES, SourceFile, StoredFile, open_file
from titanlite.runtime.cache import Recent
from titanlite.runtime.errors import Problem
from titanlite.runtime.retry import is_transient

CACHE_BYTES = 512 * 2**20
"""Memory for row groups: about the text of one block of the permutation, in which rows are read in random order."""

BUFFER_BYTES = 2**20

FOOTER_BYTES = 2**16
"""What Arrow reads first of a Parquet file: its end, with the metadata."""

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
                counts = row_counts(open_parquet(opened))
        except BadRowError:
            counts = []
        row = 0
        for group, row_count in enumerate(counts):
            try:
                texts = _load(path, group, self.field)
            except BadRowError:
                texts = [None] * row_count
            for place in range(row_count):
                row += 1
                text = None if texts[place] is None else texts[place].as_py()
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
                open_parquet(opened)  # raises the reason, if it is not an empty table
            raise BadRowError("the file has no rows")
        group = piece.offset
        texts = self._row_groups.get((path, group), lambda: _load(path, group, self.field))
        return text_of(piece, texts[piece.size], self.field)


def open_parquet(opened: IO[bytes]) -> Any:
    """Open a Parquet file for reading. Raises BadRowError if it is empty or not Parquet."""
    import pyarrow.parquet

    if not opened.seek(0, 2):
        raise BadRowError("the file is empty")
    try:
        return pyarrow.parquet.ParquetFile(opened, buffer_size=BUFFER_BYTES)
    except (pyarrow.ArrowException, OSError) as error:
        raise damage(error, "not a readable Parquet file") from None


def row_counts(file: Any) -> list[int]:
    """Number of rows of each row group of an open Parquet file."""
    return [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]


def text_of(piece: Piece, row: Any, field: str) -> str:
    """The text of a piece of a row, an Arrow scalar. Raises BadRowError."""
    if not row.is_valid:
        raise BadRowError(f"field {field!r} is null")
    return utf8_text(row.as_buffer()[piece.begin : piece.begin + piece.length].to_pybytes())


def _load(path: SourceFile, group: int, field: str) -> Any:
    """A row group's text column as an array of bytes. Raises BadRowError if it is missing, unreadable or not text."""
    import pyarrow

    cached = _footer(path) if isinstance(path, StoredFile) else []
    with path.open(cached) if isinstance(path, StoredFile) else open_file(path) as opened:
        file = open_parquet(opened)
        kind = text_type(file.schema_arrow, field)
        cached += _column_chunk(file.metadata.row_group(group), field)
        try:
            return as_bytes(file.read_row_group(group, columns=[field]).column(field), kind).combine_chunks()
        except (pyarrow.ArrowException, OSError) as error:
            raise damage(error, f"row group {group} cannot be read") from None


def _footer(file: StoredFile) -> list[tuple[int, int]]:
    """The ranges of a Parquet file in which Arrow reads the metadata."""
    size = file.facts.bytes
    if size < FOOTER_BYTES:
        return [(0, size)] if size else []
    begin = size - FOOTER_BYTES
    length = 8 + int.from_bytes(file.range(begin, size)[FOOTER_BYTES - 8 : FOOTER_BYTES - 4], "little")
    return [(begin, size), *([(size - length, begin)] if begin > size - length >= 0 else [])]


def _column_chunk(group: Any, field: str) -> list[tuple[int, int]]:
    """The ranges of a Parquet file that have the column of a row group."""
    for column in (group.column(n) for n in range(group.num_columns)):
        if column.path_in_schema == field:
            begin = min(filter(None, (column.dictionary_page_offset, column.data_page_offset)))
            end = begin + column.total_compressed_size
            return [(first, min(end, first + BLOCK_BYTES)) for first in range(begin, end, BLOCK_BYTES)]
    return []


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
