"""JSON lines: a document is the text in one field of one line's object.

Compressed files are unpacked once, into the cache folder, so that any line can be read separately.
"""

import gzip
import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, Protocol

from titanlite.data.sources.base import HEAD_BYTES, TextSource, check_encoding, check_first_file
from titanlite.data.sources.config import CHAT, CONVERSATION_FIELDS, SourceConfig
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
from titanlite.data.sources.pieces import (
    BAD_FILE,
    ArrayError,
    BadRowError,
    FieldError,
    KindError,
    LineEndError,
    Piece,
    lines,
    no_lines,
    utf8_text,
)
from titanlite.data.sources.stored import (
    Blocks,
    BlockWriter,
    SourceFile,
    StoredFile,
    block_bounds,
    facts_of,
    mapped,
    open_file,
    read_range,
    size_of,
    stored_parts,
)
from titanlite.runtime.cache import Recent, built_once, cached_folder
from titanlite.runtime.errors import Problem
from titanlite.runtime.parts import Part

CACHE_BYTES = 64 * 2**20
"""Memory for the texts of cut rows, so that a long row is not parsed again for each piece."""

CHECKED_ROWS = 100
"""Rows of the first file that are checked for the field before a run starts."""

BYTE_ORDER_MARK = "\ufeff"
"""Written before the first line by some programs; not part of the JSON."""

UNPACKED_VERSION = 1
CHUNK_BYTES = 2**16

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Suffix -> name of a compression that can be read."""

logger = logging.getLogger("titanlite")


class Output(Protocol):
    """What lines are written to: a file, or the blocks of one."""

    def write(self, data: bytes, /) -> int: ...
    def tell(self) -> int: ...
    def truncate(self, size: int, /) -> Any: ...


class Unpacked(NamedTuple):
    """A file of complete lines. lines: number of lines. damage: why later lines are missing; "" if intact."""

    file: SourceFile | Blocks
    lines: int
    damage: str


class Jsonl(TextSource):
    """A piece is a line (offset, size) and a part of its decoded text (begin, length).

    A compressed file is read from its unpacked content. If it is damaged, one bad row follows the complete lines.
    """

    kind = "jsonl"
    keys: ClassVar[tuple[str, ...]] = ("field",)
    suffixes: ClassVar[tuple[str, ...]] = (
        *(".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".json.gz"),
        *(".jsonl.zst", ".ndjson.zst", ".json.zst"),
    )
    row_name = "line"
    reads_stores = True

    def __init__(self, config: SourceConfig) -> None:
        super().__init__(config)
        self.field = config.field or "text"
        self._cut_texts: Recent[tuple[SourceFile, int], bytes] = Recent(CACHE_BYTES, len)
        self._unpacked: dict[SourceFile, Unpacked] = {}

    def check_content(self, key: str, *, vocab_size: int, needs_documents: bool) -> list[Problem]:  # noqa: ARG002
        return check_encoding(self, key, self._head) or check_first_file(self, key, self._fault_of_first_file)

    def _head(self, path: SourceFile) -> bytes:
        with open_file(path) as opened, open_lines(opened, path.name) as lines:
            try:
                return lines.read(HEAD_BYTES)
            except UNPACKING_ERRORS:  # reported when the file is unpacked
                return b""

    def _fault_of_first_file(self, opened: IO[bytes]) -> BadRowError | None:
        """The fault of the first row of the first file, open, if no checked row is good."""
        return rows_fault(opened, self.files()[0].name, self._text_of)

    def settings(self) -> dict[str, Any]:
        return {"field": self.field}

    def can_divide(self, file: SourceFile) -> bool:
        return not self._is_copied(file)

    def scan(self, path: SourceFile, file: int, max_piece_bytes: int) -> Iterator[Piece]:
        content = self._content(path)
        with mapped(content.file) as data:
            number = 0
            for number, begin, end in lines(data, self.extent):
                row = Piece(file, number, begin, end - begin)
                # Text is never longer than its JSON form: a short line is one piece and need not be parsed.
                is_parsed = max_piece_bytes < row.size <= MAX_ROW_BYTES
                text = json_row(data[begin:end], self.field) if is_parsed else None
                if isinstance(text, bytes):
                    yield from row.parts(text, max_piece_bytes)
                else:
                    yield row  # read() raises the error of a bad row
            if content.damage:
                yield Piece(file, content.lines + 1, 0, 0, flags=BAD_FILE)
            elif not number and not self.extent:
                yield Piece(file, 1, 0, len(data), flags=BAD_FILE)

    def _content(self, path: SourceFile) -> Unpacked:
        """The lines of a file, in the cache folder if it is not a file of lines itself."""
        if not self._is_copied(path):
            return Unpacked(path, 0, "")
        if path not in self._unpacked:
            self._unpacked[path] = unpacked(path, self._copy_facts(), self._copy_lines)
        return self._unpacked[path]

    def _is_copied(self, path: SourceFile) -> bool:
        """Whether the lines are in the cache folder."""
        return bool(compression(path.name))

    def _copy_facts(self) -> list[Any]:
        """Settings that decide the lines in the cache folder."""
        return []

    def _copy_lines(self, path: SourceFile, out: Output) -> tuple[int, str]:
        """Write the lines of `path` into `out`, up to the last complete line before any damage.

        Returns the number of lines, and the damage.
        """
        return unpack_lines(path, out)

    def read(self, path: SourceFile, piece: Piece) -> str:
        content = self._content(path)
        if piece.flags & BAD_FILE:
            raise BadRowError(content.damage) if content.damage else no_lines(piece.size)
        if piece.length < 0:
            return utf8_text(self._read_text(content.file, piece))
        text = self._cut_texts.get((path, piece.offset), lambda: self._read_text(content.file, piece))
        return utf8_text(text[piece.begin : piece.begin + piece.length])

    def _read_text(self, path: SourceFile | Blocks, piece: Piece) -> bytes:
        if piece.size > MAX_ROW_BYTES:
            raise long_row(piece.size, MAX_ROW_BYTES)
        return self._text_of(read_range(path, piece.offset, piece.size))

    def _text_of(self, line: bytes) -> bytes:
        return json_text(line, self.field)


def json_text(line: bytes, field: str) -> bytes:
    """The text, in UTF-8, of a field of the JSON object in a line. Raises BadRowError."""
    row = json_value(line)
    if not isinstance(row, dict):
        raise BadRowError(f"not a JSON object but {_json_type(row)}")
    if field not in row:
        present = ", ".join(repr(name) for name in list(row)[:8]) or "no field"
        fault = f"field {field!r} is missing; the row has {present}"
        if any(isinstance(row.get(name), list) for name in CONVERSATION_FIELDS):
            raise KindError(fault, CHAT)
        raise FieldError(fault, _texts(row))
    text = row[field]
    if not isinstance(text, str):
        raise FieldError(f"field {field!r} is not text but {_json_type(text)}", _texts(row))
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRowError(
            f"field {field!r} has an unpaired surrogate, \\u{ord(text[error.start]):04x}, at character {error.start}"
        ) from None


def _texts(row: dict[str, Any]) -> list[str]:
    """The fields that hold text."""
    return [name for name, value in row.items() if isinstance(value, str)]


def json_row(line: bytes, field: str) -> bytes | BadRowError:
    """The result of json_text, or the error that it raises."""
    try:
        return json_text(line, field)
    except BadRowError as bad:
        return bad


def json_value(line: bytes) -> Any:
    """The JSON value in a line. Raises BadRowError."""
    try:
        return json.loads(utf8_text(line).removeprefix(BYTE_ORDER_MARK))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and error.doc[error.pos - 1] == "\r":
            raise LineEndError(f"a second row at character {error.pos}: lines end with CR alone, not LF") from None
        raise BadRowError(f"invalid JSON at character {error.pos}: {error.msg}") from None
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number with too many digits
        raise BadRowError(f"invalid JSON: {error}") from None


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def rows_fault(opened: IO[bytes], name: str, read: Callable[[bytes], object]) -> BadRowError | None:
    """The fault of the first row of an open file if `read` raises one for each checked row; None without rows."""
    first: BadRowError | None = None
    with open_lines(opened, name) as lines:
        try:
            rows = (line for _, line in numbered_lines(lines) if isinstance(line, BadRowError) or line.strip())
            for line in islice(rows, CHECKED_ROWS):
                if first is None and isinstance(line, bytes) and line.lstrip().startswith(b"["):
                    return ArrayError("the file is a JSON array")
                try:
                    if isinstance(line, BadRowError):
                        raise line
                    read(line)
                except BadRowError as bad:
                    first = first or bad
                else:
                    return None
        except UNPACKING_ERRORS as error:
            if is_damage(error):
                return None
            raise
    return first


def compression(name: str) -> str:
    """The compression of a file of this name; "" if it is not compressed."""
    return next((kind for suffix, kind in COMPRESSIONS.items() if name.lower().endswith(suffix)), "")


def open_lines(opened: IO[bytes], name: str) -> io.BufferedIOBase:
    """Open the lines of an open file, unpacked if its name is that of a compressed file.

    Reading may raise UNPACKING_ERRORS. Up to CHUNK_BYTES before damaged zstd data are lost: pyarrow does not return
    them.
    """
    kind = compression(name)
    if not kind:
        return opened  # type: ignore[return-value]
    packed_bytes = opened.seek(0, io.SEEK_END)
    opened.seek(0)
    if kind == "gzip":
        read = gzip.GzipFile(fileobj=opened).read1
    else:
        import pyarrow

        read = pyarrow.CompressedInputStream(pyarrow.PythonFile(opened, "r"), "zstd").read
    return io.BufferedReader(_Unpacking(read, packed_bytes), CHUNK_BYTES)


class _Unpacking(io.RawIOBase):
    """Unpacked data, read by `read`. Raises ExpansionError if `packed_bytes` have too much or too many lines."""

    def __init__(self, read: Callable[[int], bytes], packed_bytes: int) -> None:
        self._read, self._packed_bytes = read, packed_bytes
        self._size = self._lines = self._line_begin = 0

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any, /) -> int:
        data = self._read(len(out))
        out[: len(data)] = data
        self._lines += data.count(b"\n")
        if last := data.rfind(b"\n") + 1:
            self._line_begin = self._size + last
        self._size += len(data)
        require_ratio(self._size, self._packed_bytes, MAX_UNPACKED_BYTES, "it")
        require_ratio(self._size - self._line_begin, self._packed_bytes, MAX_ROW_BYTES, "a line of it")
        require_rows(self._lines, self._packed_bytes, "lines")
        return len(data)


def numbered_lines(opened: io.BufferedIOBase) -> Iterator[tuple[int, bytes | BadRowError]]:
    """Yield number, from 1, and bytes of each line, or the error of a line above MAX_ROW_BYTES, which is not loaded."""
    number = 0
    while line := opened.readline(MAX_ROW_BYTES + 2):
        number += 1
        size, end = len(line), line
        while not end.endswith(b"\n") and (end := opened.readline(CHUNK_BYTES)):
            size += len(end)
        yield number, line if size <= MAX_ROW_BYTES + 2 else long_row(size, MAX_ROW_BYTES)


CopyLines = Callable[[SourceFile, Output], tuple[int, str]]
"""See Jsonl._copy_lines."""


def unpacked(path: SourceFile, facts: list[Any], copy_lines: CopyLines) -> Unpacked:
    """Find the lines of a file in the cache, or write them; other processes wait for the one that does.

    facts: settings of copy_lines. Truncated or corrupt data gives the complete lines before the damage. Raises
    UserError if the cache folder cannot be written, and OSError if the file cannot be read. The lines of a stored file
    are in parts, which are made again if they have been removed from the cache.
    """
    key = ["unpacked", UNPACKED_VERSION, facts_of([path]), *facts]
    folder = cached_folder("unpacked", key)
    built_once(folder, f"the unpacked {path}", lambda into: _unpack(path, into, folder, copy_lines, key))
    meta = json.loads((folder / "meta.json").read_text())
    if not isinstance(path, StoredFile):
        return Unpacked(folder / "content", meta["lines"], meta["damage"])
    block = partial(_unpacked_block, path, key, copy_lines, meta["written"])
    return Unpacked(Blocks(meta["bytes"], block), meta["lines"], meta["damage"])


def _unpack(path: SourceFile, into: Path, folder: Path, copy_lines: CopyLines, key: list[Any]) -> None:
    if isinstance(path, StoredFile):
        blocks = BlockWriter(lambda number, content: stored_parts().add([*key, number], content))
        lines, damage = copy_lines(path, blocks)
        blocks.finish()
        size, written = blocks.size, blocks.written
    else:
        with open(into / "content", "wb") as out:
            lines, damage = copy_lines(path, out)
        size = written = (into / "content").stat().st_size
    meta = {"lines": lines, "damage": damage, "bytes": size, "written": written}
    (into / "meta.json").write_text(json.dumps(meta))
    sizes = [f"{count / 2**20:,.1f} MiB" for count in (size_of(path), size)]
    logger.info("unpacked %s (%s) into %s (%s)%s", path, sizes[0], folder, sizes[1], damage and f": {damage}")


def _unpacked_block(path: StoredFile, key: list[Any], copy_lines: CopyLines, written: int, number: int) -> Part:
    """A block of the unpacked content. If it is missing, the file is unpacked again from its beginning, and all blocks
    are kept if they fit into half of the cache, otherwise this one and the following ones that do."""
    parts, found = stored_parts(), dict[int, bytes]()

    def make() -> bytes:
        room = parts.limit // 2
        first = 0 if written <= room else number

        def keep(each: int, content: bytes) -> None:
            nonlocal room
            if each == number:
                found[number] = content
            elif each >= first and room > 0:
                parts.add([*key, each], content)
            room -= len(content) if each >= first else 0
            if found and room <= 0:
                raise _EnoughError

        blocks = BlockWriter(keep)
        with suppress(_EnoughError):
            copy_lines(path, blocks)
            blocks.finish()
        return found[number]

    begin, end = block_bounds(number, written)
    return parts.get([*key, number], end - begin, make, made_with=key)


class _EnoughError(Exception):
    """The blocks that are needed are unpacked."""


def unpack_lines(path: SourceFile, out: Output) -> tuple[int, str]:
    """Unpack `path` into `out`, up to the last complete line before any damage. Returns number of lines and damage."""
    lines, complete_bytes = 0, 0
    with open_file(path) as opened, open_lines(opened, path.name) as packed:
        try:
            while chunk := packed.read1(CHUNK_BYTES):
                lines += chunk.count(b"\n")
                if b"\n" in chunk:
                    complete_bytes = out.tell() + chunk.rindex(b"\n") + 1
                out.write(chunk)
        except UNPACKING_ERRORS as error:
            if not is_damage(error):
                raise
            if isinstance(error, ExpansionError):  # its lines are not worth the space
                lines = complete_bytes = 0
            out.truncate(complete_bytes)
            return lines, damage_after(lines, error, path.name)
    return lines, ""


def damage_after(lines: int, error: Exception, name: str) -> str:
    """Describe the damage of compressed data after `lines` readable lines. name: of the file."""
    if isinstance(error, ExpansionError):
        unpack = {"gzip": "gzip -d", "zstd": "zstd -d"}[compression(name)]
        return f"the {compression(name)} data is not unpacked: {error}; if you trust it, unpack it: {unpack} FILE"
    is_short = isinstance(error, EOFError) or "Truncated" in str(error)
    fault = "ends early" if is_short else f"is corrupt ({' '.join(str(error).split())})"
    return f"the {compression(name)} data {fault} after line {lines}"
