"""The index of a source's pieces: built once, kept in the cache folder, memory-mapped."""

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from titanlite.data.arrow import ArrowReader, write_arrow_files
from titanlite.data.cache import built_once, cache_folder, content_key, file_facts
from titanlite.data.hub import content_facts, hub_files, source_split
from titanlite.data.jsonl import JsonlReader
from titanlite.data.parquet import ParquetReader
from titanlite.data.pieces import BadRowError, Piece, Reader, read_range, utf8_text
from titanlite.data.sources import SourceConfig, find_files, in_split, source_name
from titanlite.data.text import TextReader
from titanlite.runtime.errors import UserError

FORMAT_VERSION = 1
FLUSH_PIECES = 2**16

logger = logging.getLogger("titanlite")


def reader_of(source: SourceConfig) -> Reader:
    """How the files of a source of text are read."""
    if source.kind == "jsonl":
        return JsonlReader(source.field or "text")
    if source.kind == "parquet":
        return ParquetReader(source.field or "text")
    if source.kind == "hf":
        return ArrowReader(source.field or "text")
    return TextReader(source.document or "file")


class PieceIndex:
    """The pieces of one source, in the order of its files.

    records: int64 (pieces, len(Piece._fields)), memory-mapped. files: what Piece.file counts.
    """

    def __init__(self, folder: Path) -> None:
        meta = json.loads((folder / "meta.json").read_text())
        self.files = [folder / file for file in meta["files"]]  # those made with the index lie beside it
        self.text_bytes: int = meta["text_bytes"]
        shape = (meta["pieces"], len(Piece._fields))
        self.records: npt.NDArray[np.int64] = (
            np.memmap(folder / "pieces.bin", np.int64, "r", shape=shape) if shape[0] else np.empty(shape, np.int64)
        )

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, n: int) -> Piece:
        return Piece(*self.records[n].tolist())


def source_key(source: SourceConfig, contents: list[Any], max_piece_bytes: int) -> str:
    """Key of the index: it changes with `contents`, of the files, and with all that decides how they are cut."""
    settings = [source.kind, source.field or "text", source.document or "file", source_split(source)]
    return content_key(["pieces", FORMAT_VERSION, settings, max_piece_bytes, contents])


def open_index(source: SourceConfig, max_piece_bytes: int) -> PieceIndex:
    """The index of a source of text, from the cache or built now; other processes wait for the one that builds.

    A dataset of the hub is turned into Arrow files on the way. Raises UserError where the cache folder cannot be
    written or a file cannot be read.
    """
    files = [] if source.kind == "hf" else find_files(source)
    contents = content_facts(hub_files(source)) if source.kind == "hf" else [*file_facts(files)]
    folder = cache_folder() / "index" / source_key(source, contents, max_piece_bytes)
    what = f"the index of {source_name(source)}"
    return PieceIndex(built_once(folder, what, lambda into: _build(source, files, max_piece_bytes, into, what)))


def _build(source: SourceConfig, files: list[Path], max_piece_bytes: int, into: Path, what: str) -> None:
    """Write pieces.bin and meta.json; memory is bounded by FLUSH_PIECES, whatever the corpus."""
    start = time.monotonic()
    if source.kind == "python-stdlib":
        files = in_split(source, usable_files(files))
    if source.kind == "hf":
        files = write_arrow_files(source, into)
    pieces, text_bytes = 0, 0
    with open(into / "pieces.bin", "wb") as out:
        for rows in _batches(_scan(source, files, max_piece_bytes, what)):
            block = np.array(rows, dtype="<i8")
            block.tofile(out)
            pieces += len(block)
            sizes = np.where(block[:, _LENGTH] < 0, block[:, _SIZE], block[:, _LENGTH])
            text_bytes += int(sizes.sum())
    names = [file.name if file.parent == into else str(file) for file in files]
    meta = {"pieces": pieces, "text_bytes": text_bytes, "files": names}
    (into / "meta.json").write_text(json.dumps(meta))
    seconds = time.monotonic() - start
    logger.info("built %s in %.1f s: %s files, %s pieces", what, seconds, f"{len(files):,}", f"{pieces:,}")


_SIZE, _LENGTH = Piece._fields.index("size"), Piece._fields.index("length")


def _scan(source: SourceConfig, files: list[Path], max_piece_bytes: int, what: str) -> Iterator[Piece]:
    reader = reader_of(source)
    total = sum(file.stat().st_size for file in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=not sys.stderr.isatty(), leave=False) as bar:
        for number, file in enumerate(files):
            with _naming(file):
                yield from reader.scan(file, number, max_piece_bytes)
                bar.update(file.stat().st_size)


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    for piece in pieces:
        batch.append(piece)
        if len(batch) == FLUSH_PIECES:
            yield batch
            batch = []
    if batch:
        yield batch


def usable_files(files: list[Path]) -> list[Path]:
    """Those that are neither empty nor anything but UTF-8."""
    return [file for file in files if _is_usable(file)]


def _is_usable(file: Path) -> bool:
    try:
        with _naming(file):
            utf8_text(read_range(file, 0, file.stat().st_size))
    except BadRowError:
        return False
    return True


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Turn the system's errors into a UserError about this file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error}") from error
