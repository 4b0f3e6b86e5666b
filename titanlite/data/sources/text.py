"""Plain text files: a document is a file, a paragraph or a line."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, ClassVar

from titanlite.data.sources.base import HEAD_BYTES, TextSource, check_encoding, fault_problem
from titanlite.data.sources.pieces import BAD_FILE, Bytes, LineEndError, Piece, cut, lines, no_lines, utf8_text
from titanlite.data.sources.stored import SourceFile, mapped, open_file, read_range
from titanlite.runtime.errors import Problem


class Text(TextSource):
    """A piece is a byte range of a file (offset, size). Reading it takes its own bytes, for any length of the file."""

    kind = "text"
    keys: ClassVar[tuple[str, ...]] = ("document",)
    suffixes: ClassVar[tuple[str, ...]] = (".txt", ".md")
    row_name = "line"
    reads_stores = True

    def check_content(self, key: str, *, vocab_size: int, needs_documents: bool) -> list[Problem]:  # noqa: ARG002
        if problems := check_encoding(self, key, _head):
            return problems
        files = self.files() if self.config.document in ("line", "paragraph") else []
        file = next(filter(_ends_lines_with_cr, files), None)  # it would be one document
        problem = file and fault_problem(self.config, key, str(file), LineEndError())
        return [problem] if problem else []

    def settings(self) -> dict[str, Any]:
        return {"document": self.config.document or "file"}

    def can_divide(self, file: SourceFile) -> bool:  # noqa: ARG002
        return self.config.document == "line"

    def scan(self, path: SourceFile, file: int, max_piece_bytes: int) -> Iterator[Piece]:
        with mapped(path) as data:
            row = 0
            for row, first, last in self._documents(data):
                for begin, end, flags in cut(data, first, last, max_piece_bytes):
                    yield Piece(file, row, begin, end - begin, flags=flags)
                    if end < last:
                        row += data[begin:end].count(b"\n")
            if not row and not self.extent:
                yield Piece(file, 1, 0, len(data), flags=BAD_FILE)

    def _documents(self, data: Bytes) -> Iterator[tuple[int, int, int]]:
        """Yield (line number, begin, end) of each document."""
        if self.config.document == "line":
            yield from lines(data, self.extent)
        elif self.config.document == "paragraph":
            yield from _paragraphs(data)
        elif len(data):
            yield 1, 0, len(data)

    def read(self, path: SourceFile, piece: Piece) -> str:
        if piece.flags & BAD_FILE:
            raise no_lines(piece.size)
        return utf8_text(read_range(path, piece.offset, piece.size))


def _head(path: SourceFile) -> bytes:
    with open_file(path) as opened:
        return opened.read(HEAD_BYTES)


def _ends_lines_with_cr(file: SourceFile) -> bool:
    """Whether the file has several lines, and none of them ends with LF."""
    with suppress(OSError):  # reported when the file is indexed
        if b"\r" in _head(file).rstrip(b"\r"):
            with mapped(file) as data:
                return data.find(b"\n", 0, len(data)) < 0
    return False


def _paragraphs(data: Bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (line number, begin, end) of each run of nonblank lines."""
    first, begin, end, previous = 0, 0, 0, -1
    for number, line_begin, line_end in lines(data):
        if number != previous + 1:
            if end > begin:
                yield first, begin, end
            first, begin = number, line_begin
        end, previous = line_end, number
    if end > begin:
        yield first, begin, end
