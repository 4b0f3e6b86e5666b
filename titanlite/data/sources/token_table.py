"""Tables of many token files, in the cache folder: one process of a node looks at the files, the others read its table.

A table has what a process needs to open a file when it reads it, and the size and time that the file must still have
then. Its arrays are memory-mapped: their pages are shared by the processes of a node.
"""

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from titanlite.data.sources.arrays import ArrayFile, require_unchanged
from titanlite.data.sources.formats import FORMATS, RAW, DocumentStarts, Format, Head, Seen, SeparatedStarts
from titanlite.runtime.cache import Recent, built_once, cached_folder
from titanlite.runtime.errors import UserError
from titanlite.runtime.json_files import JsonError, read_json

TABLE_VERSION = 2
TABLE_FILES = 256
"""A source with more files has a table. With fewer, each process looks at the files itself."""
KEPT_FILES = 256
"""Files of a source that stay prepared for reading. OpenFiles limits those that are open."""

_FORMATS = (*FORMATS, RAW)
_DIGEST = (np.uint8, 16)
_ROW = np.dtype(
    [
        ("path_end", "<i8"),
        ("bytes", "<i8"),
        ("mtime_ns", "<i8"),
        ("format", "<i4"),
        ("dtype", "S4"),
        ("begin", "<i8"),
        ("tokens", "<i8"),
        ("has_hashes", "?"),
        ("hash", _DIGEST),
        ("hash_of_documents", _DIGEST),
    ]
)
_PACKED = struct.Struct("<qqqi4sqq?16s16s")
"""A token file. path_end: in paths.bin. begin: the first byte of the ids. hashes: those of tokens.json."""
_STARTS_ROW = np.dtype([("has_file", "?"), ("bytes", "<i8"), ("mtime_ns", "<i8"), ("pages_end", "<i8")])
_PACKED_STARTS = struct.Struct("<?qqq")
"""Its documents. has_file: whether a file records them, with these bytes and this time. pages_end: in pages.bin."""

Starts = DocumentStarts | SeparatedStarts
Hashes = Mapping[Any, tuple[str, str]]


class Look(NamedTuple):
    """What the first process of a node has seen of a source, for the others.

    path, dtype: of the source. table, starts: folders of its tables; starts is "" if no documents are read. key: hash
    of the facts of its files. facts: its part of the fingerprint that depends on files.
    """

    path: str
    dtype: str
    table: str
    starts: str
    key: str
    facts: dict[str, Any]


_LOOKS: dict[tuple[str, str], Look] = {}


def use_looks(looks: Sequence[Sequence[Any]]) -> None:
    """Let the sources of this process have the files that a process of this node has looked at; [] ends it."""
    _LOOKS.clear()
    _LOOKS.update({(look.path, look.dtype): look for look in (Look(*values) for values in looks)})


def looks_in_use() -> list[Look]:
    """Those in use, for a worker of this process."""
    return [*_LOOKS.values()]


def look_of(path: str, dtype: str) -> Look | None:
    return _LOOKS.get((path, dtype))


@dataclass(frozen=True)
class _Meta:
    """The schema of meta.json. folders: of the files, by _name_of. manifests: their tokens.json, without shards and
    sources. documents: files beside which another one records documents."""

    folders: list[str]
    manifests: dict[str, dict[str, Any]]
    documents: int


def _name_of(folder: str) -> str:
    """A path as text that JSON can contain: a byte of a name that is not UTF-8 has no character there."""
    return os.fsencode(folder).decode("latin-1")


def _folder_of(name: str) -> Path:
    """The inverse of _name_of."""
    return Path(os.fsdecode(name.encode("latin-1")))


class Paths(Sequence[Path]):
    """The paths of a table."""

    def __init__(self, names: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> None:
        self._names, self._ends = names, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[Path]:
        names, begin = self._names.tobytes(), 0  # a part of a mapped array takes longer than the rest of a path
        for end in self._ends.tolist():
            yield Path(os.fsdecode(names[begin:end]))
            begin = end

    @overload
    def __getitem__(self, key: int) -> Path: ...

    @overload
    def __getitem__(self, key: slice) -> list[Path]: ...

    def __getitem__(self, key: int | slice) -> Path | list[Path]:
        if isinstance(key, slice):
            return [self[n] for n in range(len(self))[key]]
        n = range(len(self))[key]
        return Path(os.fsdecode(self._names[self._ends[n - 1] if n else 0 : self._ends[n]].tobytes()))


class TokenTable:
    """A table in the cache folder. rows: of the files, in their order."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError if it cannot be read."""
        self.folder = folder
        try:
            self.rows = np.memmap(folder / "rows.bin", _ROW, "r")
            names = np.memmap(folder / "paths.bin", np.uint8, "r")
            meta: _Meta = read_json(folder / "meta.json", _Meta)
        except (OSError, JsonError, ValueError) as error:
            raise UserError(
                f"the table of token files in {folder}, which another process of this node has written, cannot be "
                f"read: {error}: let TITANLITE_CACHE name one folder on all ranks of a node"
            ) from None
        self.paths = Paths(names, self.rows["path_end"])
        self.folders = [_folder_of(each) for each in meta.folders]
        self.manifests = {_folder_of(each): manifest for each, manifest in meta.manifests.items()}
        self.all_have_documents = meta.documents == len(self.rows)

    def described_types(self) -> list[str]:
        """The types of files of formats that are described, see Format."""
        types = np.unique(self.rows[["format", "dtype"]])
        return sorted(
            {np.dtype(each["dtype"].decode()).name for each in types if _FORMATS[each["format"]].is_described}
        )

    def hashes(self, number: int) -> tuple[str, str] | None:
        """Those of a file and of the file of its documents, in hex, by tokens.json."""
        row = self.rows[number]
        return (row["hash"].tobytes().hex(), row["hash_of_documents"].tobytes().hex()) if row["has_hashes"] else None


def build_table(
    files: Iterable[tuple[Seen, Head]],
    dtype: str,
    facts: list[Any],
    manifests: Mapping[Any, Mapping[str, Any]],
    what: str,
    check: Callable[[], None],
) -> Path:
    """The folder of the table of these files, from the cache or built. Raises UserError.

    files: read once, if the table is built. dtype: of files that do not contain it. facts: what decides the content of
    the files and of their manifests. check: raises UserError if they have changed meanwhile.
    """

    def build(into: Path) -> None:
        hashes = hashes_of(manifests)
        folders, documents, end = dict[str, None](), 0, 0
        with open(into / "rows.bin", "wb") as rows, open(into / "paths.bin", "wb") as paths:
            for seen, head in files:
                path = str(seen.file)
                name = os.fsencode(path)
                end += len(name)
                folders[os.path.dirname(path)] = None
                documents += seen.documents is not None
                rows.write(_row_of(seen.format, head, end, hashes.get(seen.file) if hashes else None))
                paths.write(name)
        heads = {
            _name_of(str(folder)): {key: value for key, value in manifest.items() if key not in ("shards", "sources")}
            for folder, manifest in manifests.items()
        }
        meta = _Meta([*map(_name_of, folders)], heads, documents)
        (into / "meta.json").write_text(json.dumps(asdict(meta)))
        check()

    return built_once(cached_folder("tokens", [TABLE_VERSION, dtype, facts]), what, build)


def hashes_of(manifests: Mapping[Any, Mapping[str, Any]]) -> Hashes:
    """The hashes of the files that these manifests list, by file: of the tokens, and of the documents."""
    return {
        folder / shard["file"]: (shard["xxh3_128"], shard["xxh3_128_of_documents"])
        for folder, manifest in manifests.items()
        for shard in manifest["shards"]
    }


_NUMBERS = {id(each): number for number, each in enumerate(_FORMATS)}
"""Format -> its number in a table. To compare them would take longer."""


def _row_of(found: Format, head: Head, path_end: int, hashes: tuple[str, str] | None) -> bytes:
    """The row of a file."""
    digests = map(_digest_of, hashes) if hashes else (bytes(_DIGEST[1]), bytes(_DIGEST[1]))
    place = _NUMBERS[id(found)], head.dtype.encode(), head.begin, head.tokens
    return _PACKED.pack(path_end, head.size, head.mtime_ns, *place, bool(hashes), *digests)


def _digest_of(hashed: str) -> bytes:
    """The bytes of a hash; 0 for other text, which no file has as its hash."""
    with suppress(ValueError):
        if len(found := bytes.fromhex(hashed)) == _DIGEST[1]:
            return found
    return bytes(_DIGEST[1])


def build_starts(table: TokenTable, looks: Sequence[Seen], what: str) -> Path:
    """The folder of the starts of documents of a table's files, from the cache or built: the first start of each page
    of positions. looks: at these files. Raises UserError, also if positions are not in order."""

    def build(into: Path) -> None:
        with open(into / "rows.bin", "wb") as rows, open(into / "pages.bin", "wb") as pages:
            pages.write(np.zeros(1, np.int64).data)  # an empty file cannot be mapped
            _write_starts(looks, table.rows["tokens"].tolist(), rows, pages)

    # without the facts of the files of documents, which those of the table have
    return built_once(cached_folder("starts", [TABLE_VERSION, table.folder.name]), what, build)


def _write_starts(looks: Sequence[Seen], tokens: Sequence[int], rows: IO[bytes], pages: IO[bytes]) -> None:
    """tokens: of each file."""
    end = 1
    for seen, count in zip(looks, tokens, strict=True):
        if seen.of_documents is None:
            rows.write(_PACKED_STARTS.pack(False, 0, 0, end))
            continue
        beside, size, mtime_ns, _ = seen.of_documents
        found = seen.pages
        if found is None:
            found = DocumentStarts(seen.format.positions(seen.file), count).pages.tobytes()
            require_unchanged(beside, os.stat(beside), size, mtime_ns)
        pages.write(found)
        end += len(found) // 8
        rows.write(_PACKED_STARTS.pack(True, size, mtime_ns, end))


class TokenFiles:
    """Token files that are opened when this object is made. paths: in their order. counts: of their tokens.
    reads_starts: whether starts() has those of documents."""

    def __init__(
        self, paths: Sequence[Any], opened: Sequence[ArrayFile], starts: Sequence[Starts], hashes: Hashes
    ) -> None:
        """starts: [] if documents are not read."""
        self.paths, self.counts = paths, np.array([len(tokens) for tokens in opened], np.int64)
        self._opened, self._starts, self._hashes = opened, starts, hashes
        self.reads_starts = bool(starts)

    def tokens(self, number: int) -> ArrayFile:
        return self._opened[number]

    def starts(self, number: int) -> Starts | None:
        """The starts of the documents of a file; None if documents are not read."""
        return self._starts[number] if self._starts else None

    def hashes(self, number: int) -> tuple[str, str] | None:
        """Those of a file and of the file of its documents; None if no tokens.json has them."""
        return self._hashes.get(self.paths[number])

    def check_unchanged(self, number: int) -> None:
        """Raise UserError if a file has changed since this object was made."""
        self._opened[number].check_unchanged()
        if self._starts:
            self._starts[number].check_unchanged()


class TableFiles(TokenFiles):
    """The token files of a table, opened when they are read."""

    def __init__(self, table: TokenTable, eos: int, starts: Path | None = None) -> None:
        """starts: the folder of build_starts; None: documents are not read."""
        self._table, self._eos, self._folder = table, eos, starts
        self.reads_starts = starts is not None
        self.paths, self.counts = table.paths, table.rows["tokens"]
        self._tokens: Recent[int, ArrayFile] = Recent(KEPT_FILES, lambda _: 1)
        self._of_documents: Recent[int, Starts] = Recent(KEPT_FILES, lambda _: 1)

    @cached_property
    def _starts_rows(self) -> npt.NDArray[Any]:
        assert self._folder is not None, "documents are read"
        return np.memmap(self._folder / "rows.bin", _STARTS_ROW, "r")

    @cached_property
    def _pages(self) -> npt.NDArray[np.int64]:
        assert self._folder is not None, "documents are read"
        return np.memmap(self._folder / "pages.bin", np.int64, "r")

    def tokens(self, number: int) -> ArrayFile:
        """Raises UserError, also if the file has changed since the table was written."""
        return self._tokens.get(number, partial(self._open, number))

    def _open(self, number: int) -> ArrayFile:
        row, path = self._table.rows[number], self.paths[number]
        self._require(path, row)
        return ArrayFile(path, row["dtype"].decode(), int(row["begin"]), int(row["tokens"]))

    def starts(self, number: int) -> Starts | None:
        """Errors: as tokens()."""
        if self._folder is None:
            return None
        return self._of_documents.get(number, partial(self._open_starts, number))

    def _open_starts(self, number: int) -> Starts:
        found, path, row = _FORMATS[self._table.rows[number]["format"]], self.paths[number], self._starts_rows[number]
        if not row["has_file"]:
            return SeparatedStarts(self.tokens(number), self._eos, begins=found.eos_begins)
        begin = self._starts_rows[number - 1]["pages_end"] if number else 1
        beside = found.documents(path)
        self._require(beside or path.with_suffix(found.beside), row)
        return DocumentStarts(found.positions(path), int(self.counts[number]), self._pages[begin : row["pages_end"]])

    def hashes(self, number: int) -> tuple[str, str] | None:
        return self._table.hashes(number)

    def check_unchanged(self, number: int) -> None:
        path = self.paths[number]
        self._require(path, self._table.rows[number])
        if self._folder is not None and (row := self._starts_rows[number])["has_file"]:
            self._require(path.with_suffix(_FORMATS[self._table.rows[number]["format"]].beside), row)

    @staticmethod
    def _require(path: Path, row: Any) -> None:
        """Raise UserError unless the file has the size and time of its row."""
        try:
            found = os.stat(path)
        except OSError as error:
            raise UserError(f"{path} can no longer be read: {error.strerror}") from None
        require_unchanged(path, found, int(row["bytes"]), int(row["mtime_ns"]))
