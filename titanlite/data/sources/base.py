"""Base classes of sources. A source finds, checks and reads the files of one [[data.sources]] table.

Each kind is a subclass of Source in its own file, registered in titanlite.data.kinds. Most kinds are TextSources: text
in files that can be indexed.
"""

import codecs
import glob
import json
import os
import shlex
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, NamedTuple

import xxhash

from titanlite.data.sources.config import CHAT, SourceConfig
from titanlite.data.sources.pieces import (
    ArrayError,
    BadRowError,
    ConversationError,
    FieldError,
    KindError,
    LineEndError,
    Piece,
)
from titanlite.data.sources.stored import Listing, SourceFile, StoredFile, facts_of, open_file
from titanlite.runtime.cache import built_once, cached_folder, content_key
from titanlite.runtime.errors import Problem, UserError
from titanlite.runtime.files import OpenFile
from titanlite.runtime.json_files import read_json
from titanlite.storage.address import is_address

CACHED_VERSION = 3
"""Version of the files that cached_json writes."""

BLOCK_BYTES = 8 * 2**10
SAMPLED_BLOCKS = 8
"""Blocks that are read of a large file, evenly spaced from its first to its last bytes. Files of up to
64 KiB, the size of all blocks, are read entirely."""

MAX_BLOCK_ROWS = 1024
MAX_BLOCK_BYTES = 4 * 2**20
"""A block of a streamed source ends with the row that reaches either limit. Each stream keeps one block in memory."""

_INDEX_KEYS = ("field", "document", "split")
_OTHER_KEYS = ("subset", "revision", "streaming", "loss_on", "too_long")
"""Keys that every index includes; keys that do not decide the pieces of a file, which no index includes."""

_OF_LINES = ("jsonl", CHAT)
"""Kinds of sources of JSON lines."""

MAX_SUFFIXES = 8
"""Suffixes of unread files that are named."""

HEAD_BYTES = 2**12
"""Bytes at the beginning of a file that show its encoding."""

STORE_RULE = "the address of objects that can be listed and read"

CHECKED_STORED = 32
"""Files of a store whose encoding is checked before a run starts: each takes a request."""

READERS = 16
"""Files that are read concurrently: most of the time is spent waiting for the file system."""
MAX_READ_AT_ONCE = 64
"""Files of one task of a reader, if there are many."""


class Source(ABC):
    """A source of a run. keys: keys of its table that not all kinds have, besides `path`.

    suffixes: files to read in a folder. holds: whether the files contain text to tokenize, or tokens.
    """

    kind: ClassVar[str]
    keys: ClassVar[tuple[str, ...]] = ()
    suffixes: ClassVar[tuple[str, ...]] = ()
    holds: ClassVar[Literal["text", "tokens"]] = "text"
    needs_path: ClassVar[bool] = True
    has_revision: ClassVar[bool] = False
    reads_stores: ClassVar[bool] = False
    """Whether the path may be an address of an object store: files are SourceFiles then, not only Paths."""
    shuffling_note: ClassVar[str] = ""
    """Note for the log about reading the source in a shuffled order."""

    def __init__(self, config: SourceConfig) -> None:
        self.config = config

    @property
    def name(self) -> str:
        """Name in messages."""
        return self.config.name or f"{self.kind} {self.config.path}"

    @property
    def size_unit(self) -> str:
        """Unit of the size: "tokens" or "bytes"; "" if the size is unknown."""
        return "tokens" if self.holds == "tokens" else "bytes"

    @property
    def is_stored(self) -> bool:
        """Whether the path is an address of an object store."""
        return is_address(self.config.path)

    @cached_property
    def listing(self) -> Listing:
        """The objects of the store when first used. Raises UserError."""
        return Listing(self.config.path)

    @property
    def is_folder(self) -> bool:
        """Whether the path is that of a folder."""
        return self.listing.is_folder if self.is_stored else os.path.isdir(self.config.path)

    def files(self) -> Sequence[SourceFile]:
        """Files of the source, in their order; may be empty. All uses of this object see the same list."""
        return self._files

    @cached_property
    def _files(self) -> Sequence[SourceFile]:
        return self._find_files()

    def _find_files(self) -> Sequence[SourceFile]:
        """The files that the path selects now, sorted by path. Skips hidden files in folders and globs."""
        if self.is_stored:
            files, is_folder = self.listing.files, self.listing.is_folder
            return [file for file in files if not is_folder or file.name.lower().endswith(self.suffixes)]
        found = {Path(entry).absolute() for entry, is_file in self.entries if is_file}
        return sorted(found, key=lambda file: file.as_posix())

    @cached_property
    def entries(self) -> list[tuple[str, bool]]:
        """Entries that the path selects, and whether each is a file; of a path that is not stored, when first used."""
        return self._list_entries()

    def _list_entries(self) -> list[tuple[str, bool]]:
        return [(entry, os.path.isfile(entry)) for entry in self._entries()]

    def _entries(self) -> list[str]:
        """Entries that the path selects: files, and folders, links, pipes or devices whose names match."""
        path = self.config.path
        if os.path.isfile(path):
            return [path]
        if os.path.isdir(path):
            return [entry for entry in _entries_below(path) if entry.lower().endswith(self.suffixes)]
        folder = _existing_part(path)
        return glob.glob(glob.escape(folder) + path[len(folder) :], recursive=True)

    def describe_unread(self) -> str:
        """Numbers of the files in the source's folder that it does not read, by suffix; "" for a file or a glob."""
        files = self.files()
        unread = {*self.files_below()}.difference(files) if files else ()
        counts = Counter(file.suffix or file.name for file in unread)
        return ", ".join(f"{count} {suffix}" for suffix, count in sorted(counts.items())[:MAX_SUFFIXES])

    def files_below(self) -> Iterable[SourceFile]:
        """The files below the source's folder, without hidden ones; none if its path is not that of a folder."""
        if self.is_stored:
            return self.listing.files if self.listing.is_folder else ()
        return files_below(self.config.path)

    def check_keys(self, key: str) -> list[Problem]:  # noqa: ARG002
        """Problems of the table at `key` ("data.sources.0") that are specific to this kind. Does not access files."""
        return []

    def check_folder(self, key: str) -> list[Problem]:
        """Problems of the folder that the path lists, before it is listed. key: of the path."""
        if self.is_stored or not _is_machine(_listed_folder(self.config.path)):
            return []
        rule = "a folder of data, or a glob below one"
        remedy = "name the folder of your files: this path would list all files of the machine"
        return [Problem(key, self.config.path, rule, remedy)]

    def check_files(self, key: str) -> list[Problem]:
        """Problems of the list of files. Called if the keys have no problem; does not read the files."""
        path = self.config.path
        if self.is_stored:
            rule = f"an object, a folder with {self._suffixes()} objects, or a glob that matches objects"
            remedy = f"nothing matches below {self.listing.base}: fix the address"
            return [] if self.files() else [Problem(f"{key}.path", path, rule, remedy)]
        entries = self.entries if path else []
        other = [entry for entry, is_file in entries if not is_file and not os.path.isdir(entry)]
        if other:
            fault = "is a pipe or device" if os.path.exists(other[0]) else "is a link to a file that does not exist"
            rule, remedy = "regular files", f"{os.path.abspath(other[0])} {fault}: replace or remove it"
            return [Problem(f"{key}.path", path, rule, remedy)]
        if any(is_file for _, is_file in entries):
            return []
        rule = f"a file, a folder with {self._suffixes()} files, or a glob that matches files"
        full = os.path.join(os.getcwd(), path)
        remedy = f"nothing matches {full}: fix the path (relative to the current folder)"
        if not path:
            rule, remedy = f"{rule}; required for kind = {self.kind!r}", "write the path of your files"
        return [Problem(f"{key}.path", path, rule, remedy)]

    def check_store(self, key: str) -> list[Problem]:
        """Problems of a path in an object store: that the kind does not read it, or that it cannot be listed."""
        if not self.is_stored:
            return []
        if not self.reads_stores:
            rule = f"a path: kind = {self.kind!r} reads no object stores"
            remedy = "copy the files to a disk, or read them with kind jsonl, chat, parquet, csv, arrow, text or tokens"
            return [Problem(f"{key}.path", self.config.path, rule, remedy)]
        try:
            self.files()
        except UserError as error:
            return [Problem(f"{key}.path", self.config.path, STORE_RULE, str(error))]
        return []

    def _suffixes(self) -> str:
        return " or ".join(f"*{suffix}" for suffix in self.suffixes)

    def check_content(self, key: str, *, vocab_size: int, needs_documents: bool) -> list[Problem]:  # noqa: ARG002
        """Problems of the files' content, from the start of each file. Called if the list of files has no problem.

        vocab_size: the model's; 0 or less: unknown. needs_documents: whether attention stays inside documents.
        """
        return []

    def pinned_revision(self, key: str) -> str:  # noqa: ARG002
        """The commit that `revision` of the table at `key` resolves to now, so that all ranks and later starts read
        the same data.

        "" if the source has no revision. Raises ConfigError.
        """
        return ""

    def settings(self) -> dict[str, Any]:
        """Keys that decide the documents or tokens of the files, for the fingerprint."""
        return {}

    @cached_property
    def content_facts(self) -> list[Any]:
        """Facts that change with the content of the files: paths, sizes, times and inodes, when first used; of stored
        files, addresses, sizes and ETags."""
        return self._current_facts()

    @property
    def content_hash(self) -> str:
        """Hash of content_facts."""
        return content_key(self.content_facts)

    def _current_facts(self) -> list[Any]:
        """The facts of now; of stored files, those of the listing."""
        return current_facts(self.files())

    def facts(self, *, document_mask: bool) -> dict[str, Any]:  # noqa: ARG002
        """The source's part of the fingerprint of the data. Raises UserError if a file cannot be read, or has changed
        since content_facts was first used.

        document_mask: whether to include the starts of documents, which token files keep in separate files.
        """
        return self._settings_facts() | self._file_facts(self.files())

    def _settings_facts(self) -> dict[str, Any]:
        facts = {"name": self.name, "kind": self.kind, **self.settings()}
        return facts | {"weight": self.config.weight, "epochs": self.config.epochs}

    def _file_facts(self, files: Sequence[SourceFile]) -> dict[str, Any]:
        before = self.content_facts
        content = self._content_digest(files)
        self._require_unchanged(before)
        return {"files": len(files), "bytes": sum(fact[1] for fact in before[: len(files)]), "content": content}

    def _require_unchanged(self, before: Sequence[Any]) -> None:
        """Raise UserError if a file has changed. before: content_facts of earlier."""
        listed = type(self)(self.config) if self.is_stored else self
        if changed := set(before) - set(listed._current_facts()):
            raise UserError(
                f"{min(changed)[0]} was written while the run was starting: start again when the files are complete"
            )

    def digests(self) -> list[str]:
        """Digests in hex of the files in their order, see sampled_digest."""
        return self._digests(self.files())

    def _content_digest(self, files: Sequence[SourceFile]) -> str:
        found = bytes.fromhex("".join(self._digests(files)))
        return f"xxh3-128:{xxhash.xxh3_128(found).hexdigest()}"

    def _digests(self, files: Sequence[SourceFile]) -> list[str]:
        """Cached of stored files only: nodes may share a cache folder, but not the files."""

        def digests() -> list[str]:
            size = max(1, min(MAX_READ_AT_ONCE, len(files) // (4 * READERS)))  # else a file costs less than its task
            parts = [files[begin : begin + size] for begin in range(0, len(files), size)]
            with ThreadPoolExecutor(READERS) as pool:
                found = pool.map(lambda part: [sampled_digest(file).hex() for file in part], parts)
                return [digest for of_part in found for digest in of_part]

        what = f"the digests of {self.name}"
        return cached_json("digests", facts_of(files), what, digests) if self.is_stored else digests()


def current_facts(files: Sequence[SourceFile]) -> list[Any]:
    """See content_facts. Raises UserError."""
    try:
        return [*facts_of(files)]
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from None


def cached_json(kind: str, facts: list[Any], what: str, make: Callable[[], Any]) -> Any:
    """The JSON value made by make(), from the cache if it has one of the same facts. See built_once."""

    def build(into: Path) -> None:
        (into / "value.json").write_text(json.dumps({"value": make()}))

    folder = built_once(cached_folder(kind, [kind, CACHED_VERSION, *facts]), what, build)
    return read_json(folder / "value.json")["value"]


def sampled_digest(file: SourceFile) -> bytes:
    """Digest (16 bytes) of a file's size and of its sampled blocks; see SAMPLED_BLOCKS. Raises UserError."""
    try:
        if isinstance(file, StoredFile):
            digest = digest_of_samples(file.facts.bytes, file.read)
            file.check_unchanged()
            return digest
        opened = OpenFile(file, reads_ahead=False)
        return digest_of_samples(opened.facts.st_size, lambda begin, end: opened.read(begin, end - begin))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error}") from error


def digest_of_samples(size: int, read: Callable[[int, int], bytes]) -> bytes:
    """As sampled_digest. read: the bytes from a position to another."""
    digest = xxhash.xxh3_128(size.to_bytes(8, "little"))
    if size <= SAMPLED_BLOCKS * BLOCK_BYTES:
        begins, length = [0], size
    else:
        last = size - BLOCK_BYTES
        begins, length = [last * n // (SAMPLED_BLOCKS - 1) for n in range(SAMPLED_BLOCKS)], BLOCK_BYTES
    for begin in begins:
        digest.update(read(begin, begin + length))
    return digest.digest()


def fault_problem(config: SourceConfig, key: str, file: str, fault: BadRowError) -> Problem | None:
    """The Problem of the table at `key` that a fault of the first rows of a file shows; None if it is of the rows."""
    if isinstance(fault, FieldError):
        remedy = "use files that have a field of text"
        if fault.texts:
            first, *others = fault.texts
            remedy = f"write field = {json.dumps(first, ensure_ascii=False)}, or add --{key}.field {shlex.quote(first)}"
            remedy += f"; other fields of text: {', '.join(map(repr, others[:7]))}" if others else ""
        field, rule = config.field or "text", "a field that contains text"
        return Problem(f"{key}.field", field, rule, f"{file}: {fault}; {remedy}")
    if isinstance(fault, KindError):
        remedy = f'write kind = "{fault.kind}", or add --{key}.kind {fault.kind}'
        if fault.kind == CHAT and config.kind not in _OF_LINES:
            remedy = conversations_as_lines(config)
        return Problem(f"{key}.kind", config.kind, "the kind of the rows", f"{file}: {fault}; {remedy}")
    if isinstance(fault, ArrayError):
        remedy = f"{file} is a JSON array; to make lines of it: jq -c '.[]' {shlex.quote(file)} > lines.jsonl"
        return Problem(f"{key}.path", config.path, "files with one JSON object per line", remedy)
    if isinstance(fault, LineEndError):
        convert = _conversion(file, r"tr '\r' '\n'")
        remedy = f"{file} has lines that end with CR alone: {convert}"
        return Problem(f"{key}.path", config.path, "lines that end with LF, or CR and LF", remedy)
    if isinstance(fault, ConversationError):
        remedy = f"none of the first lines of {file} is one; the first of them: {fault}"
        return Problem(f"{key}.path", config.path, "files with a conversation in each line", remedy)
    return None


def conversations_as_lines(config: SourceConfig, kind: str = "") -> str:
    """What to do with conversations that are not JSON lines. kind: of the files, such as parquet; default: config's."""
    path = f"{config.path}/**/*.{kind or config.kind}" if os.path.isdir(config.path) else config.path
    arguments = {"path": kind or config.kind, "data_files": path, "split": "train"}
    if config.kind == "hf":
        arguments = {"path": config.path, "name": config.subset, "split": config.split or "train"}
    given = ", ".join(f"{name}={json.dumps(value)}" for name, value in arguments.items() if value)
    code = f'from datasets import load_dataset; load_dataset({given}).to_json("chat.jsonl")'
    return (
        f"conversations are read from JSON lines: python -c {shlex.quote(code)}, then "
        f'kind = "{CHAT}" and path = "chat.jsonl"'
    )


def _existing_part(path: str) -> str:
    """The folder that a path begins with and that exists; no pattern, whatever its name. "": none."""
    folder = path
    while folder and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def _listed_folder(path: str) -> str:
    """The folder whose files at all depths a path lists; os.devnull: it lists only some folders, or none."""
    if os.path.isdir(path):
        return path
    folder = _existing_part(path)
    parts = path[len(folder) :].lstrip(os.sep).split(os.sep)
    return folder if "**" in parts and glob.has_magic(parts[0]) else os.devnull


def _is_machine(folder: str) -> bool:
    """Whether a folder, behind all links, is one whose listing is endless: the root, devices, processes."""
    real = os.path.realpath(folder).strip("/")  # it may begin with two
    return real in {"", "dev"} or f"{real}/".startswith(("proc/", "sys/"))


def _entries_below(folder: str) -> Iterator[str]:
    """Files, folders and links at all depths, without hidden ones.

    Links to folders are followed, except out of the data: to a folder that the link is in, or to files of the system.
    """
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(parent, name) for name in (*folders, *names) if not name.startswith("."))
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        here = os.path.join(os.path.realpath(parent), "") if links else ""
        for name in links:
            target = os.path.realpath(os.path.join(parent, name))
            if _is_machine(target) or here.startswith(os.path.join(target, "")):
                folders.remove(name)


def files_below(folder: str) -> Iterator[Path]:
    """The files below a folder, without hidden ones; none if it is not a folder."""
    for parent, folders, names in os.walk(folder if folder else os.devnull):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name).absolute() for name in names if not name.startswith("."))


def check_first_file(source: Source, key: str, fault_in: Callable[[IO[bytes]], BadRowError | None]) -> list[Problem]:
    """Problems of the rows of the source's first file: their kind, and the field of their text.

    fault_in: finds the fault of an open file. Other faults of rows are reported when a row is needed, by
    data.on_bad_row.
    """
    file = source.files()[0]
    try:
        with open_file(file) as opened:
            fault = fault_in(opened)
    except OSError as error:
        remedy = f"{file} cannot be read: {error.strerror or error}; fix this, or the path"
        return [Problem(f"{key}.path", source.config.path, "readable files", remedy)]
    problem = fault and fault_problem(source.config, key, str(file), fault)
    return [problem] if problem else []


def check_encoding(source: Source, key: str, read_head: Callable[[SourceFile], bytes]) -> list[Problem]:
    """A problem if a file is text in UTF-16 or UTF-32, most of which is valid UTF-8 with NULs.

    read_head: the first HEAD_BYTES of a file, unpacked. Of a store, the first CHECKED_STORED files are read.
    """
    files = source.files()[:CHECKED_STORED] if source.is_stored else source.files()

    def encoding_of(file: SourceFile) -> str:
        try:
            return wide_encoding(read_head(file))
        except OSError:  # reported when the file is indexed
            return ""

    with ThreadPoolExecutor(READERS) as pool:
        encodings = zip(files, pool.map(encoding_of, files), strict=True)
        file, encoding = next(((file, encoding) for file, encoding in encodings if encoding), (None, ""))
    if file is None:
        return []
    remedy = f"{file} is {encoding}: {_conversion(str(file), f'iconv -f {encoding} -t UTF-8')}"
    return [Problem(f"{key}.path", source.config.path, "text in UTF-8", remedy)]


def _conversion(file: str, command: str) -> str:
    """A command that replaces the content of a file, unpacked, by what `command` makes of it."""
    path, new = shlex.quote(file), shlex.quote(f"{file}.new")
    unpack, pack = next((pipe for suffix, pipe in _PIPES.items() if file.lower().endswith(suffix)), ("cat", ""))
    if is_address(file):
        return f"write it again from {unpack} FILE | {command}{pack}"
    return f"{unpack} {path} | {command}{pack} > {new} && mv {new} {path}"


def wide_encoding(head: bytes) -> str:
    """The name, for iconv, of the UTF-16 or UTF-32 that the beginning of a file shows; "" if it is none.

    Without a byte order mark, it is the one of which at least a hundredth of the characters are spaces or line ends,
    and none is NUL: with the other order of bytes, a space is U+2000. Without its NULs, text in UTF-8 that has some is
    printable.
    """
    for mark, name in _BYTE_ORDER_MARKS:
        if head.startswith(mark):
            return name
    if b"\0" not in head:
        return ""
    with suppress(UnicodeDecodeError):
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # the last character may be incomplete
        if 4 * text.count("\0") < len(head) and 10 * sum(map(str.isprintable, text)) >= 7 * len(text.replace("\0", "")):
            return ""
    for name in ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE"):
        with suppress(UnicodeDecodeError):
            text = codecs.getincrementaldecoder(name)().decode(head)
            if "\0" not in text and 100 * sum(map(text.count, " \n\r")) >= len(text) > 0:
                return name
    return ""


_PIPES = {".gz": ("gzip -dc", " | gzip"), ".zst": ("zstd -dc", " | zstd")}
"""Suffix -> commands that unpack and pack a file."""

_BYTE_ORDER_MARKS = (
    *((codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32")),  # before UTF-16, whose mark they begin with
    *((codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16")),
)


class TextSource(Source):
    """Text in files with an index: files are cut into pieces once, and any piece can be read at any time.

    row_name: the word for a row in messages, "line" or "row".
    """

    row_name: ClassVar[str]
    extent: tuple[int, int] | None = None
    """Bytes [begin, end) of the only file, whose documents that begin there are read; None: all documents."""
    is_part = False
    """Whether select() has chosen what is read."""

    @property
    def reads_files_separately(self) -> bool:
        """Whether the documents of one of its files do not depend on the others, as in a kind that makes its files."""
        return type(self).indexed_files is TextSource.indexed_files

    def can_divide(self, file: SourceFile) -> bool:  # noqa: ARG002
        """Whether the documents that begin in some bytes of a file can be read without those before them."""
        return False

    def select(self, files: Sequence[SourceFile], extent: tuple[int, int] | None) -> None:
        """Read only these files, and of a single one only `extent`. Call before anything is read."""
        self._files, self.extent, self.is_part = files, extent, True

    def row_place(self, row: int) -> str:
        """The place of a row in its file, for messages."""
        behind = f" after byte {self.extent[0]:,}" if self.extent and self.extent[0] else ""
        return f"{self.row_name} {row}{behind}"

    def index_settings(self) -> list[Any]:
        """Keys that decide how files are cut into pieces. A change causes a new index."""
        config = self.config
        own = [[key, getattr(config, key)] for key in self.keys if key not in (*_INDEX_KEYS, *_OTHER_KEYS)]
        return [
            self.kind,
            config.field or "text",
            config.document or "file",
            config.split or "train",
            *own,
            *(self.extent or ()),
        ]

    def indexed_files(self, into: Path) -> Sequence[SourceFile]:  # noqa: ARG002
        """The files to index. Files that must be created first are written to the folder `into`."""
        return self.files()

    @abstractmethod
    def scan(self, path: SourceFile, file: int, max_piece_bytes: int) -> Iterator[Piece]:
        """Yield all pieces of a file in order, or one BAD_FILE if it has no row. Does not load the entire file."""

    @abstractmethod
    def read(self, path: SourceFile, piece: Piece) -> str:
        """The text of a piece, never empty. Raises BadRowError, and OSError if the file cannot be read."""

    def plain_text(self, text: str) -> str:
        """What people wrote in the text of a piece, to train a tokenizer on. Raises BadRowError."""
        return text


class ReadUnit(NamedTuple):
    """A file, or one row group of a Parquet file. first_row: number of its first row in the file, from 1."""

    file: str
    group: int = -1
    first_row: int = 1

    @property
    def row_name(self) -> str:
        """The word for a row in messages."""
        return "row" if self.file.lower().endswith(".parquet") else "line"


class Share(NamedTuple):
    """The rows with number % modulus == remainder of a unit: those of one stream if several streams share the unit."""

    remainder: int = 0
    modulus: int = 1

    def has(self, number: int) -> bool:
        return number % self.modulus == self.remainder


class Row(NamedTuple):
    """number: line or row of the file, from 1. text: UTF-8 bytes, or the error of a bad row."""

    number: int
    text: bytes | BadRowError


class StreamedSource(Source):
    """Text in local or remote files that are read sequentially, without an index and without a copy on disk."""

    @property
    def size_unit(self) -> str:
        return ""

    @abstractmethod
    def data_files(self) -> Sequence[str]:
        """Paths or URLs of its files, in order. Raises ConfigError."""

    @property
    @abstractmethod
    def origin(self) -> str:
        """Origin of the files for the description: " at commit …", or ""."""

    @abstractmethod
    def row_groups(self) -> list[ReadUnit]:
        """The row groups of all files, as units. Raises UserError."""

    @abstractmethod
    def rows(self, unit: ReadUnit, first: int, share: Share) -> Iterator[Row]:
        """Yield the rows of `share` in a unit, in order, from row `first`. Raises errors of opening and reading files.

        A unit without rows yields one bad row, and so does the lost end of a corrupted file. Rows before `first` are
        skipped: Parquet row groups are not read, rows inside a row group are decoded, lines are read and counted.
        """
