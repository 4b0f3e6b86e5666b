"""Datasets that `datasets` has turned into Arrow files on disk: a document is one row of one text column."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from titanlite.data.hub import load_builder, source_split
from titanlite.data.pieces import BAD_FILE, BadRowError, Piece, cut, flags_of, utf8_text
from titanlite.data.retry import reason
from titanlite.data.sources import SourceConfig, source_name
from titanlite.runtime.errors import UserError


def write_arrow_files(source: SourceConfig, into: Path) -> list[Path]:
    """Download the dataset and write its split as Arrow files into the folder; their paths. Raises UserError."""
    builder = load_builder(source)
    name, split, field = source_name(source), source_split(source), source.field or "text"
    folder = into / "arrow"
    try:
        builder.download_and_prepare(str(folder), file_format="arrow")
    except Exception as error:  # the library raises many kinds, and wraps what it was about
        raise UserError(
            f"{name} cannot be turned into Arrow files: {reason(error.__cause__ or error)}; streaming = true reads it "
            "row by row, and names or skips bad ones"
        ) from error
    _require_text(name, field, builder.info.features)
    files = sorted(file for file in folder.glob("*.arrow") if _split_of(file, builder.dataset_name) == split)
    kept = [file.rename(into / file.name) for file in files]
    shutil.rmtree(folder)
    return kept


def _split_of(file: Path, dataset_name: str) -> str:
    """What stands between the dataset's name and the number of the shard."""
    return file.stem.removeprefix(f"{dataset_name}-").split("-")[0]


def _require_text(name: str, field: str, features: Any) -> None:
    """Raises UserError unless the field is there and is text, for what `datasets` made of it."""
    if field not in features:
        raise UserError(f"{name}: field {field!r} is missing; there is {', '.join(map(repr, list(features)[:8]))}")
    if getattr(features[field], "dtype", "") not in ("string", "large_string"):
        raise UserError(f"{name}: field {field!r} is not text in all rows: `datasets` reads it as {features[field]}")


class ArrowReader:
    """Pieces are a row (offset: the record batch, size: the row within it) and a part of its text (begin, length)."""

    row_name: ClassVar[str] = "row"

    def __init__(self, field: str) -> None:
        self.field = field
        self._columns: dict[Path, Any] = {}

    def scan(self, path: Path, file: int, max_piece_bytes: int) -> Iterator[Piece]:
        import pyarrow.compute

        row = 0
        for batch, texts in enumerate(self._column(path).chunks):
            sizes = pyarrow.compute.binary_length(texts).fill_null(0).to_numpy(zero_copy_only=False)
            for place, size in enumerate(sizes.tolist()):
                row += 1
                whole = Piece(file, row, batch, place, 0, size)
                if size <= max_piece_bytes:
                    yield whole
                    continue
                for begin, end in cut(texts[place].as_buffer().to_pybytes(), 0, size, max_piece_bytes):
                    yield whole._replace(begin=begin, length=end - begin, flags=flags_of(begin, end, 0, size))
        if not row:
            yield Piece(file, 1, 0, 0, flags=BAD_FILE)

    def read(self, path: Path, piece: Piece) -> str:
        if piece.flags & BAD_FILE:
            raise BadRowError("the file has no rows")
        text = self._column(path).chunk(piece.offset)[piece.size]
        if not text.is_valid:
            raise BadRowError(f"field {self.field!r} is null")
        return utf8_text(text.as_buffer()[piece.begin : piece.begin + piece.length].to_pybytes())

    def _column(self, path: Path) -> Any:
        """The text column, memory-mapped: opening it reads no text."""
        import pyarrow

        if path not in self._columns:
            opened = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
            self._columns[path] = opened.read_all().column(self.field)
        return self._columns[path]
