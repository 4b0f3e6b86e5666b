"""Rows of files that are read from their beginning to their end, wherever they lie: no index, nothing on disk."""

from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from titanlite.data.hub import open_file
from titanlite.data.jsonl import json_text
from titanlite.data.parquet import as_bytes, damage, text_type
from titanlite.data.pieces import BadRowError
from titanlite.data.unpack import GZIP_DAMAGE, damage_after, open_lines

BATCH_ROWS = 1024
BUFFER_BYTES = 2**20


class Unit(NamedTuple):
    """A file, or one row group of a Parquet file. first_row: the number of its first row in the file, from 1."""

    file: str
    group: int = -1
    first_row: int = 1

    @property
    def row_name(self) -> str:
        """What a row is called in messages."""
        return "row" if self.file.lower().endswith(".parquet") else "line"


class Share(NamedTuple):
    """The rows of a unit with number ≡ part (mod of): one stream's, where several share a unit."""

    part: int = 0
    of: int = 1

    def has(self, number: int) -> bool:
        return number % self.of == self.part


class Row(NamedTuple):
    """number: line or row of its file, from 1. text: in UTF-8, or what is wrong with the row."""

    number: int
    text: bytes | BadRowError


def read_rows(unit: Unit, field: str, first: int, share: Share) -> Iterator[Row]:
    """The share's rows of a unit, in order, from number `first` on. Raises what opening and reading files raises.

    A unit without any row has one bad one, so has what is lost at the end of a damaged file. What lies before `first`
    is skipped: row groups of Parquet are not read, rows inside one are decoded, lines are read and counted.
    """
    rows = _parquet_rows if unit.row_name == "row" else _json_rows
    return (row for row in rows(unit, field, first, share) if row.number >= first and share.has(row.number))


def _json_rows(unit: Unit, field: str, first: int, share: Share) -> Iterator[Row]:
    number, blank = 0, True
    with open_file(unit.file) as opened, open_lines(opened, unit.file) as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.isspace():
                    continue
                blank = False
                if number >= first and share.has(number):
                    yield Row(number, _json_row(line.rstrip(b"\r\n"), field))
        except GZIP_DAMAGE as error:
            yield Row(number + 1, BadRowError(damage_after(number, error)))
            return
    if blank:
        yield Row(1, BadRowError("the file has only blank lines" if number else "the file is empty"))


def _json_row(line: bytes, field: str) -> bytes | BadRowError:
    try:
        return json_text(line, field)
    except BadRowError as bad:
        return bad


def row_group_sizes(file: str) -> list[int]:
    """Rows of each row group of a Parquet file. Raises BadRowError where it is none."""
    with open_file(file) as opened:
        return _sizes(_open_parquet(opened))


def _open_parquet(opened: IO[bytes]) -> Any:
    import pyarrow
    import pyarrow.parquet

    if not opened.seek(0, 2):
        raise BadRowError("the file is empty")
    try:
        return pyarrow.parquet.ParquetFile(opened, buffer_size=BUFFER_BYTES)
    except (pyarrow.ArrowException, OSError) as error:
        raise damage(error, "not a parquet file that can be read") from None


def _sizes(file: Any) -> list[int]:
    return [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]


def _parquet_rows(unit: Unit, field: str, first: int, share: Share) -> Iterator[Row]:
    with open_file(unit.file) as opened:
        try:
            file = _open_parquet(opened)
        except BadRowError as bad:
            yield Row(1, bad)
            return
        sizes = dict(enumerate(_sizes(file))) if unit.group < 0 else {unit.group: _sizes(file)[unit.group]}
        number = unit.first_row
        for group, size in sizes.items():
            if number + size > first:
                yield from _group_rows(file, group, range(number, number + size), field, first, share)
            number += size
        if not sum(sizes.values()):
            yield Row(1, BadRowError("the file has no rows"))


def _group_rows(file: Any, group: int, numbers: range, field: str, first: int, share: Share) -> Iterator[Row]:
    """The rows of one row group, decoded a batch at a time; from the first that cannot be read on, all are bad."""
    import pyarrow

    done = 0
    try:
        kind = text_type(file.schema_arrow, field)
        # Without threads: those that read Python's files can outlive the interpreter, and crash it.
        for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=[field], use_threads=False):
            here = numbers[done : done + len(batch)]
            kept = [number for number in here if number >= first and share.has(number)]
            texts = as_bytes(batch.column(0), kind).take([number - here.start for number in kept]).to_pylist()
            for number, text in zip(kept, texts, strict=True):
                yield Row(number, BadRowError(f"field {field!r} is null") if text is None else text)
            done += len(batch)
    except (pyarrow.ArrowException, OSError, BadRowError) as error:
        bad = damage(error, f"row group {group} cannot be read")
        yield from (Row(number, bad) for number in numbers[done:])
