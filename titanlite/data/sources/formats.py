"""Formats of token files: how each is recognized, and where its type, its number of ids and its documents are."""

import gzip
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from titanlite.data.sources.arrays import ArrayFile
from titanlite.data.sources.limits import UNPACKING_ERRORS, is_damage
from titanlite.data.sources.stored import SourceFile, StoredFile, facts_of, open_file, read_range, size_of
from titanlite.runtime.cache import built_once, cached_folder
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import OpenFile

Int64s = npt.NDArray[np.int64]
FileT = TypeVar("FileT", Path, StoredFile, SourceFile)

STARTS_PER_PAGE = 2**9
"""Starts of documents in 4 KiB of their file. The first of each page is kept in memory."""
PAGES_PER_READ = 2**7

CHECKED_TOKENS = 2**16
"""Tokens at the start of each file that are checked before a run starts."""

DOCUMENTS = ".documents"
"""The suffix of titanlite's files of the positions at which documents start."""

_WIDTHS = {2: "uint16", 4: "uint32"}
"""Bytes of an id -> its type, in formats that record no more."""
_MEGATRON_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_MEGATRON_MAGIC, _MEGATRON_HEADER = b"MMIDIDX\0\0", struct.Struct("<9sQBQQ")
_LLM_C = {20240520: ("uint16", 1), 20240801: ("uint32", 7)}
"""Magic number -> type of the ids, version."""
_LLM_C_BYTES = 4 * 256
HEAD_BYTES = 2**12
"""Bytes at the start of a file that show its format."""
_ROW_BYTES = 2**16


class Layout(NamedTuple):
    """The type of the ids, "" if numpy's header has it; their first byte; their number, None: up to the end."""

    dtype: str
    begin: int = 0
    num_tokens: int | None = None


class Positions(NamedTuple):
    """The positions at which documents start. path: of their file. read: positions `begin` to `end` - 1.

    arrays: what they are read from.
    """

    path: SourceFile
    num_documents: int
    read: Callable[[int, int], Int64s]
    arrays: tuple[ArrayFile, ...]


class Format(NamedTuple):
    """A format of token files. has_type: whether the files contain the type of the ids.

    magic: their first bytes. beside: the suffix of the file of documents; without magic, it shows the format.
    layout: of a file that has its type. positions: where the documents of a file start. eos_begins: whether an id that
    separates documents is the first one of a document, not the last one.
    """

    name: str
    suffix: str
    magic: bytes
    beside: str
    layout: Callable[[SourceFile], Layout]
    positions: Callable[[SourceFile], Positions]
    has_type: bool = True
    eos_begins: bool = False

    @property
    def is_described(self) -> bool:
        """Whether the type of the ids is in another file, or in a header that others than numpy write."""
        return self.has_type and self.name != "numpy"

    def documents(self, file: SourceFile) -> SourceFile | None:
        """The file that records where the documents of a token file start; None if there is none."""
        if isinstance(file, Path):  # with_suffix() takes most of the time of a look at many files
            beside = self.beside_of(file)
            return Path(beside) if beside and os.path.isfile(beside) else None
        found = file.with_suffix(self.beside) if self.beside else file
        return found if found != file and found.is_file() else None

    def beside_of(self, file: Path) -> str:
        """The path of the file of documents, if there is one; "" if the format has none."""
        beside = f"{os.path.splitext(file)[0]}{self.beside}"
        return beside if self.beside and beside != str(file) else ""

    def open(self, file: SourceFile, dtype: str) -> ArrayFile:
        """Open the ids of a token file of this format. dtype: see open_tokens. Raises UserError."""
        layout = self.layout(file) if self.has_type else Layout(dtype)
        return ArrayFile(file, layout.dtype, layout.begin, layout.num_tokens)


def format_of(file: SourceFile) -> Format:
    """The format of a token file, from its name, its first bytes and the files beside it. Raises UserError."""
    return shown_format(file, read_head(file))


def shown_format(file: SourceFile, head: bytes) -> Format:
    """As format_of, of a file with these first bytes."""
    suffix = os.path.splitext(file.name)[1].lower()
    for each in FORMATS:
        if suffix == each.suffix and (head.startswith(each.magic) if each.magic else each.documents(file) is not None):
            return each
    return RAW


def read_head(file: SourceFile) -> bytes:
    """The first bytes of a file. Raises UserError."""
    return _read(file, 0, HEAD_BYTES)


def open_starts(file: SourceFile, tokens: ArrayFile, eos: int = -1) -> "DocumentStarts | SeparatedStarts":
    """Open the starts of the documents of a token file. eos: the id that separates them, if it records none.

    Raises UserError.
    """
    found = format_of(file)
    if found.documents(file) is None:
        return SeparatedStarts(tokens, eos, begins=found.eos_begins)
    return DocumentStarts(found.positions(file), len(tokens))


def open_tokens(file: SourceFile, dtype: str) -> ArrayFile:
    """Open the ids of a token file. dtype: of a file that does not contain it, little-endian. Raises UserError."""
    return format_of(file).open(file, dtype)


class Head(NamedTuple):
    """What a look at the start of a token file has found. most, least: of the first CHECKED_TOKENS ids, 0 if there is
    none. Others: see ArrayFile."""

    dtype: str
    begin: int
    tokens: int
    size: int
    mtime_ns: int
    most: int
    least: int

    def fits(self, vocab_size: int) -> bool:
        """Whether these ids are in the vocabulary."""
        return self.least >= 0 and self.most < vocab_size


class Seen(NamedTuple):
    """What a look has found of a token file.

    facts: see Source.content_facts. documents: the file that records where its documents start; None without one.
    of_documents: its facts. head: None if no ids were read, or if they cannot be, which `fault` explains. digests: of
    both files, see sampled_digest; None if they were not read. pages: see DocumentStarts; None of files of documents
    that were not read, or that are large or wrong.
    """

    file: SourceFile
    facts: tuple[Any, ...]
    format: Format
    documents: SourceFile | None
    of_documents: tuple[Any, ...] | None
    head: Head | None = None
    fault: str = ""
    digest: bytes | None = None
    digest_of_documents: bytes | None = None
    pages: bytes | None = None


def read_start(file: SourceFile, of_file: Format, dtype: str) -> tuple[Head, npt.NDArray[Any]]:
    """The head of a file of this format, and its first CHECKED_TOKENS ids. dtype: see open_tokens. Raises UserError."""
    opened = of_file.open(file, dtype)
    opened.stop_reading_ahead()
    ids = opened.read(0, min(CHECKED_TOKENS, len(opened)))
    return head_of(ids, opened.begin, len(opened), opened.size, opened.mtime_ns), ids


def head_of(ids: npt.NDArray[Any], begin: int, tokens: int, size: int, mtime_ns: int) -> Head:
    """The head of a file with these first ids. Others: see ArrayFile."""
    least = int(ids.min(initial=0)) if ids.dtype.kind == "i" else 0
    return Head(ids.dtype.str, begin, tokens, size, mtime_ns, int(ids.max(initial=0)), least)


def documents_file(file: FileT) -> FileT:
    """The file of titanlite of the positions at which documents start: a .npy of int64, ascending."""
    return file.with_suffix(DOCUMENTS)


class DocumentStarts:
    """The positions at which documents start in a token file, in ascending order. They are read from their file."""

    def __init__(self, positions: Positions, num_tokens: int, pages: Int64s | None = None) -> None:
        """Read the file once. Raises UserError if it does not have positions from 0 to num_tokens in order.

        pages: the first start of each page, of a file that was read before.
        """
        self._positions = positions
        if pages is not None:
            self.pages = pages
            return
        firsts, last = [np.empty(0, np.int64)], 0
        for begin in range(0, positions.num_documents, PAGES_PER_READ * STARTS_PER_PAGE):
            block = positions.read(begin, min(begin + PAGES_PER_READ * STARTS_PER_PAGE, positions.num_documents))
            if block[0] < last or (np.diff(block) < 0).any() or block[-1] > num_tokens:
                raise UserError(
                    f"{positions.path} must have positions from 0 to {num_tokens:,} in ascending order: write it again"
                )
            firsts.append(block[::STARTS_PER_PAGE].copy())
            last = block[-1]
        self.pages = np.concatenate(firsts)
        """The first start of each page."""

    def check_unchanged(self) -> None:
        """Raise UserError if the file has changed since it was opened."""
        for array in self._positions.arrays:
            array.check_unchanged()

    def between(self, begin: int, end: int, extent: tuple[int, int] | None = None) -> Int64s:  # noqa: ARG002
        """The starts from `begin` to `end` - 1. Raises UserError if the file has become shorter."""
        pages = np.searchsorted(self.pages, (begin, end))
        first = max(0, int(pages[0]) - 1) * STARTS_PER_PAGE  # the page before may end with starts inside
        found = self._positions.read(
            first, max(first, min(int(pages[1]) * STARTS_PER_PAGE, self._positions.num_documents))
        )
        inside = np.searchsorted(found, (begin, end))
        return found[inside[0] : inside[1]]


class SeparatedStarts:
    """The positions at which documents start in a token file: those of an id, or after them. The first token is one."""

    def __init__(self, tokens: ArrayFile, eos: int, *, begins: bool) -> None:
        self._tokens, self._eos, self._shift = tokens, eos, 0 if begins else 1
        self.check_unchanged = tokens.check_unchanged

    def between(self, begin: int, end: int, extent: tuple[int, int] | None = None) -> Int64s:
        """The starts from `begin` to `end` - 1. Raises UserError if the file has become shorter. extent: see read."""
        first = max(0, begin - self._shift)
        tokens = self._tokens.read(first, end - self._shift, extent)
        found = np.flatnonzero(tokens == self._eos) + first + self._shift
        return np.union1d(found, [0]) if begin == 0 else found


def _read(file: SourceFile, begin: int, end: int) -> bytes:
    """Bytes [begin, end) of a file, fewer if it ends before. Raises UserError."""
    try:
        if isinstance(file, Path):
            return OpenFile(file, reads_ahead=False).read(begin, end - begin)
        return read_range(file, begin, max(0, min(end, size_of(file)) - begin))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from None


def _last(array: ArrayFile) -> int:
    """The last element; 0 if there is none."""
    return int(array.read(max(0, len(array) - 1), len(array)).sum())


def _own_positions(file: SourceFile) -> Positions:
    starts = ArrayFile(path := documents_file(file))
    if starts.dtype != np.dtype("<i8"):
        raise UserError(f"{path} must be a 1-D array of int64, but is 1-D {starts.dtype}")
    return Positions(path, len(starts), starts.read, (starts,))


def _starts_from_ends(ends: ArrayFile) -> Positions:
    """The starts of documents that follow each other, of which the first starts at 0."""

    def read(begin: int, end: int) -> Int64s:
        found = ends.read(max(0, begin - 1), max(0, end - 1)).astype(np.int64)
        return np.concatenate([np.zeros(1, np.int64), found]) if begin == 0 < end else found

    return Positions(ends.path, len(ends), read, (ends,))


def _of_size(file: SourceFile, index: SourceFile, tokens: int, widths: dict[int, str]) -> Layout:
    """The layout of a file that has as many ids as `index` records, of a type that its size shows."""
    size = size_of(file)
    width = next((width for width in widths if width * tokens == size), 0)
    if not width:
        described = f"{index} describes {tokens:,} ids of {' or '.join(map(str, widths))} bytes"
        raise UserError(f"{file} has {size:,} bytes, but {described}: copy or write both files again")
    return Layout(widths[width], 0, tokens)


def _datatrove_ends(file: SourceFile) -> ArrayFile:
    index = file.with_suffix(".ds.index")
    if (size := size_of(index)) % 8:
        raise UserError(f"{index} has {size:,} bytes, which are not a multiple of 8, the size of a position")
    return ArrayFile(index, "uint64", 0, size // 8)


def _datatrove(file: SourceFile) -> Layout:
    """The last field of the first line of .ds.metadata is the number of bytes of an id."""
    ends, metadata, loss = _datatrove_ends(file), file.with_suffix(".ds.metadata"), file.with_suffix(".ds.loss")
    if loss.exists():
        raise UserError(f"{loss} excludes tokens from the loss, which is not read: write the files without it")
    widths = _WIDTHS
    if metadata.exists():
        width = _read(metadata, 0, HEAD_BYTES).partition(b"\n")[0].rpartition(b"|")[2].strip()
        widths = {bytes_: name for bytes_, name in _WIDTHS.items() if width == b"%d" % bytes_}
        if not widths:
            raise UserError(f"{metadata} must have 2 or 4, the bytes of an id, at the end of its first line")
    return _of_size(file, ends.path, _last(ends), widths)


def _megatron_index(file: SourceFile) -> tuple[np.dtype[Any], ArrayFile, ArrayFile, ArrayFile]:
    """The type of the ids, the lengths of the sequences, their first bytes in the .bin, and the first sequence of each
    document. The last entry of the documents is the number of sequences."""
    index = file.with_suffix(".idx")
    head, begin, size = _read(index, 0, _MEGATRON_HEADER.size), _MEGATRON_HEADER.size, size_of(index)
    if len(head) < begin or not head.startswith(_MEGATRON_MAGIC):
        raise UserError(f"{index} is not an index of Megatron: move it to another folder, or write both files again")
    _, version, code, sequences, documents = _MEGATRON_HEADER.unpack(head)
    if version != 1 or code not in _MEGATRON_TYPES:
        raise UserError(f"{index} has version {version} and type {code}; only version 1 with integers is read")
    if size != (needed := begin + 12 * sequences + 8 * documents) or not documents:
        described = f"its {sequences:,} sequences and {documents:,} documents need {needed:,}"
        raise UserError(f"{index} has {size:,} bytes, but {described}: copy or write it again")
    lengths = ArrayFile(index, "int32", begin, sequences)
    begins = ArrayFile(index, "int64", begin + 4 * sequences, sequences)
    return np.dtype(_MEGATRON_TYPES[code]), lengths, begins, ArrayFile(index, "int64", size - 8 * documents, documents)


def _megatron(file: SourceFile) -> Layout:
    dtype, lengths, begins, _ = _megatron_index(file)
    end = _last(begins) + dtype.itemsize * _last(lengths)
    checked = min(len(begins), STARTS_PER_PAGE * PAGES_PER_READ)
    ends = np.cumsum(lengths.read(0, checked), dtype=np.int64) * dtype.itemsize
    if (begins.read(0, checked) != np.append(0, ends)[:checked]).any():
        raise UserError(f"{begins.path} has sequences of other lengths than their positions: copy or write it again")
    return _of_size(file, begins.path, end // dtype.itemsize, {dtype.itemsize: dtype.name})


def _megatron_positions(file: SourceFile) -> Positions:
    dtype, _, begins, documents = _megatron_index(file)
    last = size_of(file)

    def read(begin: int, end: int) -> Int64s:
        first = documents.read(begin, end)
        low, high = int(first.min(initial=len(begins))), int(first.max(initial=0))
        if low < 0 or high > len(begins):
            raise UserError(f"{begins.path} has documents that begin outside its sequences: copy or write it again")
        at = np.append(begins.read(low, max(low, min(high + 1, len(begins)))), last)
        found: Int64s = at[first - low] // dtype.itemsize
        return found

    return Positions(begins.path, len(documents) - 1, read, (begins, documents))


def _olmo_ends(file: SourceFile) -> ArrayFile:
    """The ends of documents, the second column of .csv.gz, as a file in the cache folder."""
    rows = file.with_suffix(".csv.gz")

    def build(into: Path) -> None:
        most, number, last = size_of(file), 0, 0
        try:
            with open_file(rows) as packed, gzip.open(packed) as lines, (into / "ends").open("wb") as out:
                while (line := lines.readline(_ROW_BYTES)) and number < most:
                    begin, end = map(int, line.split(b",", 2)[:2])
                    if begin != last:
                        raise ValueError("a line is lost")
                    out.write(end.to_bytes(8, "little"))
                    number, last = number + 1, end
        except (ValueError, OverflowError):
            line = b"other"
        except UNPACKING_ERRORS as error:
            if not is_damage(error):
                raise
            raise UserError(f"{rows} is damaged: {error or 'it ends early'}: copy or write it again") from None
        if line:
            rule = f"must have a line START,END,… for each document of {file}, which starts where the last one ends"
            raise UserError(f"{rows} {rule}, but line {number + 1:,} is different: write it again")

    folder = built_once(cached_folder("ends", facts_of([file, rows])), str(rows), build)
    return ArrayFile(folder / "ends", "uint64", 0, size_of(folder / "ends") // 8)


def _olmo(file: SourceFile) -> Layout:
    ends = _olmo_ends(file)
    return _of_size(file, file.with_suffix(".csv.gz"), _last(ends), {1: "uint8", **_WIDTHS, 8: "uint64"})


def _llm_c(file: SourceFile) -> Layout:
    """A header of 256 numbers of 32 bits: the magic number, a version, the number of ids."""
    head = _read(file, 0, _LLM_C_BYTES)
    magic, version, tokens = np.frombuffer(head[:12].ljust(12, b"\0"), "<i4").tolist()
    dtype, expected = _LLM_C[magic]
    size, needed = size_of(file), _LLM_C_BYTES + np.dtype(dtype).itemsize * tokens
    if version != expected:
        raise UserError(f"{file} has a header of llm.c of version {version}; only {expected} is read for {magic}")
    if size != needed:
        raise UserError(f"{file} has {size:,} bytes, but its {tokens:,} ids need {needed:,}: copy or write it again")
    return Layout(dtype, _LLM_C_BYTES, tokens)


def _none(file: SourceFile) -> Positions:
    raise AssertionError(f"{file} records no documents")


FORMATS = (
    Format("numpy", ".npy", b"\x93NUMPY", DOCUMENTS, lambda _: Layout(""), _own_positions),
    Format("OLMo-core", ".npy", b"", ".csv.gz", _olmo, lambda file: _starts_from_ends(_olmo_ends(file))),
    Format("datatrove", ".ds", b"", ".ds.index", _datatrove, lambda file: _starts_from_ends(_datatrove_ends(file))),
    Format("Megatron", ".bin", b"", ".idx", _megatron, _megatron_positions),
    *(Format("llm.c", ".bin", magic.to_bytes(4, "little"), "", _llm_c, _none, eos_begins=True) for magic in _LLM_C),
)
RAW = Format("raw", "", b"", DOCUMENTS, lambda _: Layout(""), _own_positions, has_type=False)
