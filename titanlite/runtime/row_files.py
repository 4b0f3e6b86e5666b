"""Files of rows, a JSON object per line: metrics.jsonl, samples.jsonl, experts.jsonl and the ledger.

Rows are appended during a run. Before a resumed run appends, rows of later steps are cut off (`keep_rows`). Beside a
file of more than 8 MiB lies an index, NAME.index: the position, step and kind of each row, 24 bytes per row, so that a
resume and a report read no rows that they do not need. The index is only a help. It is written after each row, and
used if it is not older than the file, and the last row and 16 others are where it says; otherwise all rows are read.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from titanlite.runtime.durability import appears_complete, replace_file
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import no_link, open_regular
from titanlite.runtime.logging import log

INDEXED_BYTES = 8 * 2**20
"""Size from which a file has an index."""
INDEX_SUFFIX = ".index"
CHECKED_ROWS = 16
_BLOCK_BYTES = 2**20
_TAIL_BYTES = 2**16
_ENTRY = np.dtype([("position", "<i8"), ("step", "<i8"), ("kind", "<i8")])

Row = dict[str, Any]
KindOf = Callable[[Mapping[str, Any]], int]
"""What a row is of its step, below 2^63: of several rows of one step and kind, the last one counts."""


def no_kinds(_: Mapping[str, Any]) -> int:
    """The kind of rows of which a step has one."""
    return 0


@dataclass(frozen=True)
class Rows:
    """Where the rows of a file are, in its order. begin, end: bytes, without the line end. others: number of lines that
    are not valid rows; an unfinished last line is one, too. size: of the file."""

    begin: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]
    kind: npt.NDArray[np.int64]
    others: int
    size: int
    is_indexed: bool

    def __len__(self) -> int:
        return len(self.step)


def find_rows(file: BinaryIO, path: Path, kind_of: KindOf) -> Rows:
    """The rows of an open file, by its index, or else by reading all of them. Raises OSError."""
    size = os.fstat(file.fileno()).st_size
    entries = _read_index(file, path, size, kind_of) if size >= INDEXED_BYTES else None
    if entries is None:
        return _read_all(file, kind_of)
    begin = entries["position"].copy()
    end = np.append(begin[1:], size) - 1
    return Rows(begin, end, entries["step"].copy(), entries["kind"].copy(), 0, size, is_indexed=True)


def _read_all(file: BinaryIO, kind_of: KindOf) -> Rows:
    """Find rows by reading them."""
    found, others, position = list[tuple[int, int, int, int]](), 0, 0
    columns: list[npt.NDArray[np.int64]] = []
    file.seek(0)
    for line in file:
        row = row_of(line)
        if row is None:
            others += 1
        else:
            length = len(line) - line.endswith(b"\n")
            found.append((position, position + length, row["step"], kind_of(row)))
        position += len(line)
        if len(found) == 2**16:  # as numbers of Python they would take 10 times the memory
            columns.append(np.array(found, dtype=np.int64))
            found.clear()
    table = np.concatenate([*columns, np.array(found, dtype=np.int64).reshape(-1, 4)])
    return Rows(table[:, 0], table[:, 1], table[:, 2], table[:, 3], others, position, is_indexed=False)


def _read_index(file: BinaryIO, path: Path, size: int, kind_of: KindOf) -> npt.NDArray[Any] | None:
    """The entries of the index of an open file; None if it has no index, or one that is not of these rows."""
    try:
        with open_regular(index_of(path)) as index:
            about = os.fstat(index.fileno())
            count, rest = divmod(about.st_size, _ENTRY.itemsize)
            if (
                rest
                or not 0 < count <= size // len('{"step":1}\n')
                or about.st_mtime_ns < os.fstat(file.fileno()).st_mtime_ns
            ):
                return None
            entries = np.frombuffer(index.read(about.st_size), _ENTRY)
    except OSError:
        return None
    begin, step = entries["position"], entries["step"]
    if len(entries) != count or begin[0] != 0 or begin[-1] >= size or (np.diff(begin) <= 0).any() or step.min() <= 0:
        return None
    for number in {round((count - 1) * n / CHECKED_ROWS) for n in range(CHECKED_ROWS + 1)}:
        first = int(begin[number])
        end = int(begin[number + 1]) if number + 1 < count else size
        line = _read(file, first, end)
        row = row_of(line)
        is_line = line.find(b"\n") == len(line) - 1 and (first == 0 or _read(file, first - 1, first) == b"\n")
        if row is None or not is_line or (row["step"], kind_of(row)) != (step[number], entries["kind"][number]):
            return None
    return entries


def _read(file: BinaryIO, begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin)


def has_begun_line(file: BinaryIO, rows: Rows) -> bool:
    """Whether the last line has no end and is no row, as while a run writes it. Raises OSError."""
    if not rows.others or _read(file, rows.size - 1, rows.size) == b"\n":
        return False
    return not len(rows) or bool(rows.end[-1] < rows.size)


def rows_at(file: BinaryIO, rows: Rows, chosen: npt.NDArray[np.int64]) -> Iterator[Row]:
    """Read the rows of these numbers, without those that were changed meanwhile. Raises OSError."""
    for number in chosen.tolist():
        row = row_of(_read(file, int(rows.begin[number]), int(rows.end[number])))
        if row is not None:
            yield row


class RowIndex:
    """The index of a file that this process appends to. Errors end it, not the run."""

    def __init__(self, path: Path, kind_of: KindOf) -> None:
        self._path, self._kind_of = path, kind_of
        self._size = os.stat(path).st_size
        self._file: int | None = None
        self._waits = self._size < INDEXED_BYTES
        if not self._waits:
            with suppress(OSError), open_regular(path) as file:
                if _read_index(file, path, self._size, kind_of) is not None:
                    self._file = os.open(index_of(path), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        if self._file is None:
            self._remove()

    def note(self, rows: Iterable[tuple[int, int, int]]) -> None:
        """Note rows that were appended: (step, kind, bytes with the line end)."""
        entries = []
        for step, kind, num_bytes in rows:
            entries.append((self._size, step, kind))
            self._size += num_bytes
        try:
            if self._file is not None:
                content = np.array(entries, _ENTRY).tobytes()
                if os.write(self._file, content) != len(content):
                    self._end()
            elif self._waits and self._size >= INDEXED_BYTES:
                self._begin()
        except OSError:
            self._end()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _begin(self) -> None:
        self._waits = False
        with open_regular(self._path) as file:
            found = _read_all(file, self._kind_of)
        if found.size == self._size and not found.others:
            write_index(self._path, found, np.arange(len(found)))
            self._file = os.open(index_of(self._path), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)

    def _end(self) -> None:
        self._waits = False
        with suppress(OSError):
            self.close()
        self._remove()

    def _remove(self) -> None:
        with suppress(OSError):
            index_of(self._path).unlink(missing_ok=True)


def index_of(path: Path) -> Path:
    return path.with_name(path.name + INDEX_SUFFIX)


def write_index(path: Path, rows: Rows, kept: npt.NDArray[np.int64]) -> None:
    """Write the index of a file that consists of the `kept` ones of `rows`, in this order. Raises OSError."""
    entries = np.zeros(len(kept), _ENTRY)
    lengths = rows.end[kept] - rows.begin[kept] + 1
    entries["position"] = np.cumsum(lengths) - lengths
    entries["step"], entries["kind"] = rows.step[kept], rows.kind[kept]
    replace_file(index_of(path), entries.tobytes(), synced=False)


def keep_rows(path: Path, last_step: int, kind_of: KindOf = no_kinds) -> None:
    """Keep exactly the rows of steps up to `last_step` in the file at `path`, in order, one per step and kind.

    Removed are: rows of later steps, which the resumed run writes again; lines that are not valid rows (truncated by a
    power failure or a full disk); and, of several rows of the same step and kind, all but the last. The bytes of other
    rows do not change. The number of removed rows and the reasons are logged.

    Atomic: readers, and a start after a kill at any moment, find the old file or the complete new one; the new one is
    on disk before this returns. A file that needs no change, or does not exist, is not touched. A large file whose end
    only is removed is truncated; others are written anew. Not safe for several processes at once. Raises UserError if
    the file cannot be read or replaced.
    """
    try:
        with open_regular(path) as file:
            rows = find_rows(file, path, kind_of)
            kept = _kept(rows, last_step)
            ends = rows.end[kept] + 1
            cut = int(ends[-1]) if len(kept) else 0
            is_start = np.array_equal(rows.begin[kept], np.append(0, ends[:-1])[: len(kept)])
            is_changed = not is_start or cut != rows.size
            try:
                if is_changed and is_start and INDEXED_BYTES <= cut <= rows.size:
                    _truncate(path, cut)
                elif is_changed:
                    _rewrite(path, file, rows, kept)
            except OSError as error:
                raise UserError(f"cannot rewrite {path}: {error.strerror}") from None
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(cannot_read(path, error)) from None
    if cut >= INDEXED_BYTES and (is_changed or not rows.is_indexed):
        with suppress(OSError):
            write_index(path, rows, kept)
    _log_removed(path, rows, kept, last_step)


def _kept(rows: Rows, last_step: int) -> npt.NDArray[np.int64]:
    """Numbers of the rows to keep, in their order in the new file."""
    found = np.flatnonzero(rows.step <= last_step)
    step, kind = rows.step[found], rows.kind[found]
    order = np.lexsort((found, kind, step))
    step, kind = step[order], kind[order]
    is_last = np.append((step[1:] != step[:-1]) | (kind[1:] != kind[:-1]), True)[: len(order)]
    last = np.sort(found[order[is_last]])
    return last[np.argsort(rows.step[last], kind="stable")]


def _truncate(path: Path, size: int) -> None:
    descriptor = no_link(os.fspath(path), os.O_WRONLY)
    try:
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rewrite(path: Path, file: BinaryIO, rows: Rows, kept: npt.NDArray[np.int64]) -> None:
    with appears_complete(path) as new, new.open("xb") as out:
        for begin, end in zip(rows.begin[kept].tolist(), rows.end[kept].tolist(), strict=True):
            out.write(_read(file, begin, end) + b"\n")


def _log_removed(path: Path, rows: Rows, kept: npt.NDArray[np.int64], last_step: int) -> None:
    later = int((rows.step > last_step).sum())
    removed = {
        f"of steps after {last_step}, from which the run resumes": later,
        "replaced by a later row of the same step": len(rows) - later - len(kept),
        "unfinished or unreadable": rows.others,
    }
    if sum(removed.values()):
        reasons = ", ".join(f"{count} {why}" for why, count in removed.items() if count)
        log.info("%s: %d rows removed: %s", path, sum(removed.values()), reasons)


def cannot_read(path: Path, error: OSError) -> str:
    """The message for a file that cannot be read."""
    why = error.strerror or error
    return f"cannot read {path}: {why}: rename or remove it; the run resumes without earlier rows"


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of the file at `path`; none if it does not exist. Raises UserError if it cannot be read."""
    try:
        with open_regular(path) as file:
            yield from file
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(cannot_read(path, error)) from None


def lines_from_end(path: Path) -> Iterator[bytes]:
    """The lines of the file at `path`, the last one first, without line ends; otherwise as lines_of."""
    try:
        with open_regular(path) as file:
            position, rest = os.fstat(file.fileno()).st_size, list[bytes]()
            while position:
                block = _read(file, max(0, position - _TAIL_BYTES), position)
                position -= _TAIL_BYTES if position > _TAIL_BYTES else position
                first, *lines = block.split(b"\n")
                if lines:
                    yield b"".join([lines.pop(), *reversed(rest)])
                    yield from reversed(lines)
                    rest.clear()
                rest.append(first)
            if rest:
                yield b"".join(reversed(rest))
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(cannot_read(path, error)) from None


_DECODER = json.JSONDecoder()  # json.loads with options would build one per line


def row_of(line: bytes) -> Row | None:
    """The row in a line; None if it is not a valid row. A truncated row is invalid JSON: it lacks its last brace.

    parse_json would take five times as long.
    """
    try:
        row = _DECODER.decode(line.decode())
    except (ValueError, RecursionError):
        return None
    is_row = type(row) is dict and type(row.get("step")) is int and 0 < row["step"] < 2**63
    return row if is_row else None
