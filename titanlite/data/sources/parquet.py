"""Parquet files: a document is one row of a text column."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titanlite.data.sources.base import TextSource
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.pieces import BAD_FILE, BadRowError, Piece, cut, flags_of, utf8_text
from titanlite.runtime.cache import Recent
from titanlite.runtime.retry import is_transient

CACHE_BYTES = 512 * 2**20
"""Memory for row groups: about the text of one block of the permutation, in which rows are read in random order."""

TEXT_TYPES = ("string", "large_string", "string_view")
"""Arrow types of a text column. The column may also be dictionary-encoded."""


class Parquet(TextSource):
    """A piece is a row (offset: row group, size: row within the group) and a part of its text (begin, length)."""

    kind = "parquet"
    keys = ("field",)
    suffixes = (".parquet",)
    row_name = "row"
    shuffling_note = "shuffled row by row: each rank decodes all row groups"

    def __init__(self, config: SourceConfig) -> None:
        super().__init__(config)
        self.field = config.field or "text"
        self._row_groups: Recent[tuple[Path, int], Any] = Recent(CACHE_BYTES, lambda column: int(column.nbytes))

    def settings(self) -> dict[str, Any]:
        return {"field": self.field}

    def scan(self, path: Path, file: int, max_piece_bytes: int) -> Iterator[Piece]:
        try:
            row_counts = _row_counts(path)
        except BadRowError:
            row_counts = []
        if not sum(row_counts):
            yield Piece(file, 1, 0, 0, flags=BAD_FILE)
            return
        row = 0
        for group, row_count in enumerate(row_counts):
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
                    continue
                for begin, end in cut(text, 0, len(text), max_piece_bytes):
                    yield uncut._replace(begin=begin, length=end - begin, flags=flags_of(begin, end, 0, len(text)))

    def read(self, path: Path, piece: Piece) -> str:
        if piece.flags & BAD_FILE:
            _row_counts(path)
            raise BadRowError("the file has no rows")
        group = piece.offset
        texts = self._row_groups.get((path, group), lambda: _load(path, group, self.field))
        text = texts[piece.size].as_py()
        if text is None:
            raise BadRowError(f"field {self.field!r} is null")
        return utf8_text(text[piece.begin : piece.begin + piece.length])


def _row_counts(path: Path) -> list[int]:
    """Number of rows of each row group. Raises BadRowError if the file is not Parquet."""
    import pyarrow
    import pyarrow.parquet

    if path.stat().st_size == 0:
        raise BadRowError("the file is empty")
    with open(path, "rb") as file:
        try:
            metadata = pyarrow.parquet.ParquetFile(file).metadata
        except (pyarrow.ArrowException, OSError) as error:
            raise damage(error, "not a readable Parquet file") from None
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _load(path: Path, group: int, field: str) -> Any:
    """A row group's text column as an array of bytes. Raises BadRowError if it is missing, unreadable or not text."""
    import pyarrow
    import pyarrow.parquet

    with open(path, "rb") as file:
        try:
            opened = pyarrow.parquet.ParquetFile(file)
            kind = text_type(opened.schema_arrow, field)
            column = opened.read_row_group(group, columns=[field]).column(field)
            return as_bytes(column, kind).combine_chunks()
        except (pyarrow.ArrowException, OSError) as error:
            raise damage(error, f"row group {group} cannot be read") from None


def text_type(schema: Any, field: str) -> Any:
    """The Arrow type of a text column's values. Raises BadRowError if the column is missing or not text."""
    import pyarrow

    if schema.names.count(field) != 1:
        fault = "not unique" if field in schema.names else "missing"
        raise BadRowError(f"field {field!r} is {fault}; the file has {', '.join(map(repr, schema.names[:8]))}")
    kind = schema.field(field).type
    value_kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if str(value_kind) not in TEXT_TYPES:
        raise BadRowError(f"field {field!r} is not text but {kind}")
    return value_kind


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
