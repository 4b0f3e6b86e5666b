"""CSV and Arrow files: a document is the text in one column of a row.

The column is written once as JSON lines into the cache folder, so that any row can be read separately.
"""

import csv
import io
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

from titanlite.data.sources.ipc import IpcReader, texts
from titanlite.data.sources.jsonl import CHECKED_ROWS, Jsonl, Output, open_lines
from titanlite.data.sources.limits import (
    MAX_ROW_BYTES,
    MAX_UNPACKED_BYTES,
    UNPACKING_ERRORS,
    ExpansionError,
    is_damage,
    long_row,
    require_ratio,
    require_rows,
)
from titanlite.data.sources.parquet import text_type
from titanlite.data.sources.pieces import BadRowError, FieldError
from titanlite.data.sources.stored import SourceFile, open_file, size_of

CONVERSION_ERRORS = (*UNPACKING_ERRORS, ValueError)
"""Exceptions of damaged data, among other errors: see is_damage. Those of pyarrow are ValueErrors."""


class Table(Jsonl):
    """A piece is a line of the converted file (offset, size) and a part of its text (begin, length).

    Rows are counted from 1, without a header and without blank lines.
    """

    row_name = "row"

    @abstractmethod
    def rows(self, opened: IO[bytes], name: str) -> Iterator[str | BadRowError | None]:
        """Yield the text of each row of an open file, or the reason of a bad row; None: null.

        Raises BadRowError if the column is missing or not text, and CONVERSION_ERRORS.
        """

    def _fault_of_first_file(self, opened: IO[bytes]) -> BadRowError | None:
        try:
            next(self.rows(opened, self.files()[0].name), None)
        except BadRowError as bad:
            return bad
        except CONVERSION_ERRORS as error:
            if not is_damage(error):
                raise
        return None

    def _is_copied(self, path: SourceFile) -> bool:  # noqa: ARG002
        return True

    def _copy_facts(self) -> list[Any]:
        return [self.kind, self.field]

    def _copy_lines(self, path: SourceFile, out: Output) -> tuple[int, str]:
        count, size = 0, size_of(path)
        with open_file(path) as opened:
            try:
                for row in self.rows(opened, path.name):
                    out.write(_json_line(str(row) if isinstance(row, BadRowError) else {self.field: row}))
                    count += 1
                    require_ratio(out.tell(), size, MAX_UNPACKED_BYTES, "its text")
                    require_rows(count, size)
            except BadRowError as bad:
                return count, str(bad)
            except ExpansionError as error:  # its rows are not worth the space
                out.truncate(0)
                return 0, f"the file is not read: {error}; if you trust it, write it as uncompressed JSON lines"
            except CONVERSION_ERRORS as error:
                if not is_damage(error):
                    raise
                return count, f"the file is damaged after row {count}: {error or 'it ends early'}"
        return count, ""

    def _text_of(self, line: bytes) -> bytes:
        if line.startswith(b'"'):
            raise BadRowError(json.loads(line))
        return super()._text_of(line)


class Csv(Table):
    """Comma-separated values with a header, in UTF-8; quoted values may contain line ends."""

    kind = "csv"
    suffixes = (".csv", ".csv.gz", ".csv.zst")

    def rows(self, opened: IO[bytes], name: str) -> Iterator[str | BadRowError | None]:
        csv.field_size_limit(MAX_ROW_BYTES)
        # Invalid UTF-8 becomes surrogates, for which Jsonl reports the row.
        with (
            open_lines(opened, name) as unpacked,
            io.TextIOWrapper(_ShortLines(unpacked), "utf-8-sig", "surrogateescape", newline="") as text,  # type: ignore[type-var]
        ):
            reader = csv.reader(text, strict=True)
            header = _next_row(reader)
            if not isinstance(header, list):
                raise header or BadRowError("the file is empty")
            if header.count(self.field) != 1:
                fault = "not unique" if self.field in header else "missing"
                present = ", ".join(map(repr, header[:8]))
                raise FieldError(f"field {self.field!r} is {fault}; the header has {present}", _columns(header, reader))
            column = header.index(self.field)
            while (row := _next_row(reader)) is not None:
                if isinstance(row, list) and len(row) != len(header):
                    fault = f"{len(row)} values, but the header has {len(header)}"
                    row = BadRowError(f"the row that ends at line {reader.line_num} has {fault}")
                yield row[column] if isinstance(row, list) else row


class _ShortLines(io.BufferedIOBase):
    """The bytes of a file. Raises ValueError in a line of more than MAX_ROW_BYTES, before it is in memory."""

    def __init__(self, opened: io.BufferedIOBase) -> None:
        self._opened, self._line_bytes = opened, 0

    def readable(self) -> bool:
        return True

    def read1(self, size: int | None = -1, /) -> bytes:
        data = self._opened.read1(-1 if size is None else size)
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._line_bytes = len(data) - end if end else self._line_bytes + len(data)
        if self._line_bytes > MAX_ROW_BYTES:
            raise ValueError(f"a line has more than {MAX_ROW_BYTES:,} bytes: divide its text")
        return data

    read = read1


def _columns(header: list[str], reader: Any) -> list[str]:
    """The columns with a unique name; first the one with the longest value in the first rows, which may be the text."""
    sizes = Counter[str]()
    for _ in range(CHECKED_ROWS):
        row = _next_row(reader)
        for column, value in zip(header, row if isinstance(row, list) else [], strict=False):
            sizes[column] = max(sizes[column], len(value))
    unique = [column for column in header if header.count(column) == 1]
    return sorted(unique, key=lambda column: -sizes[column])


def _next_row(reader: Any) -> list[str] | BadRowError | None:
    """The next row of a CSV file that is not blank, or the reason of a bad row; None at the end."""
    try:
        return next(filter(None, reader), None)
    except csv.Error as error:
        return BadRowError(f"invalid CSV at line {reader.line_num}: {error}")


class Arrow(Table):
    """Arrow IPC streams, as `datasets` writes them, and Arrow IPC files."""

    kind = "arrow"
    suffixes = (".arrow",)

    def _head(self, path: SourceFile) -> bytes:  # noqa: ARG002
        return b""  # binary

    def rows(self, opened: IO[bytes], name: str) -> Iterator[str | BadRowError | None]:  # noqa: ARG002
        reader = IpcReader(opened)
        text_type(reader.schema, self.field)
        for column in reader.columns(self.field):
            for text in texts(column):
                if text is not None and len(text) > MAX_ROW_BYTES:
                    yield long_row(len(text), MAX_ROW_BYTES)
                else:
                    yield None if text is None else str(text, "utf-8", "surrogateescape")


def _json_line(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # surrogates
        return json.dumps(value).encode() + b"\n"
