"""Parquet files: a document is one row of one text column."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titanlite.data.sources.base import TextSource
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.pieces import BAD_FILE, BadRowError, Piece, cut, flags_of, utf8_text
from titanlite.runtime.cache import Recent
from titanlite.runtime.retry import is_transient

CACHE_BYTES = 512 * 2**20
"""Row groups kept in memory: about the text of one block of the permutation, within which rows are read at random."""

TEXT_TYPES = ("string", "large_string", "string_view")
"""Arrow's names of the types of a text column, which may be dictionary-encoded, too."""


class Parquet(TextSource):
    """Pieces are a row (offset: the row group, size: the row within it) and a part of its text (begin, length)."""

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
                whole = Piece(file, row, group, place, 0, len(text or b""))
                if text is None or len(text) <= max_piece_bytes or not _is_utf8(text):
                    yield whole
                    continue
                for begin, end in cut(text, 0, len(text), max_piece_bytes):
                    yield whole._replace(begin=begin, length=end - begin, flags=flags_of(begin, end, 0, len(text)))

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
    """Rows of each row group. Raises BadRowError where the file is not parquet."""
    import pyarrow
    import pyarrow.parquet

    if path.stat().st_size == 0:
        raise BadRowError("the file is empty")
    with open(path, "rb") as file:
        try:
            metadata = pyarrow.parquet.ParquetFile(file).metadata
        except (pyarrow.ArrowException, OSError) as error:
            raise damage(error, "not a parquet file that can be read") from None
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _load(path: Path, group: int, field: str) -> Any:
    """One row group's column as an array of bytes. Raises BadRowError where it is missing, unreadable or not text."""
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
    """The Arrow type of a text column's values. Raises BadRowError where the column is missing or not text."""
    import pyarrow

    if schema.names.count(field) != 1:
        fault = "there more than once" if field in schema.names else "missing"
        raise BadRowError(f"field {field!r} is {fault}; there is {', '.join(map(repr, schema.names[:8]))}")
    kind = schema.field(field).type
    value_kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if str(value_kind) not in TEXT_TYPES:
        raise BadRowError(f"field {field!r} is not text but {kind}")
    return value_kind


def as_bytes(column: Any, value_kind: Any) -> Any:
    """A text column (array or chunked) of values of this type, as bytes that need not be UTF-8."""
    import pyarrow

    return column.cast(value_kind).cast(pyarrow.large_binary())


def damage(error: Exception, fault: str) -> BadRowError:
    """What is wrong with data that Arrow cannot read. An error of the system or of a connection is raised as it is."""
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
