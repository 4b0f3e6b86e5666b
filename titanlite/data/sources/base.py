"""What a source is: one [[data.sources]] table, as its kind finds, checks and reads it.

A kind is a subclass of Source in a file of its own, and a line of titanlite.data.kinds. Most hold text in files that
can be indexed, and are TextSources.
"""

import glob
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import xxhash

from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.pieces import BadRowError, Corpus, Piece
from titanlite.runtime.cache import built_once, cache_folder, content_key, file_facts
from titanlite.runtime.errors import Problem, UserError, require

DIGEST_VERSION = 1
"""Version of the digest of a source's content. A change of the digest of any corpus is a new version."""

BLOCK_BYTES = 8 * 2**10
SAMPLED_BLOCKS = 8
"""So many blocks of a large file are read, evenly from its first bytes to its last; a file that is not larger than they
are together is read as a whole."""

MAX_BLOCK_ROWS = 1024
MAX_BLOCK_BYTES = 4 * 2**20
"""A block of a streamed source ends with the row that brings it to either: so much of each stream is in memory."""

_INDEX_KEYS = ("field", "document", "split")
_FILE_KEYS = ("subset", "revision", "streaming")
"""Keys that are in every index; and those that only say which files there are, or how they are read."""

READERS = 16
"""Files that are read at once: what takes time is to wait for their file system."""


class Source(ABC):
    """A source of a run. keys: those of its table that not all kinds have, beside `path`.

    suffixes: of the files that a folder stands for. holds: text, which a tokenizer turns into tokens, or tokens.
    """

    kind: ClassVar[str]
    keys: ClassVar[tuple[str, ...]] = ()
    suffixes: ClassVar[tuple[str, ...]] = ()
    holds: ClassVar[Literal["text", "tokens"]] = "text"
    needs_path: ClassVar[bool] = True
    has_revision: ClassVar[bool] = False
    shuffling_note: ClassVar[str] = ""
    """What is to be known about reading it in a shuffled order."""

    def __init__(self, config: SourceConfig) -> None:
        self.config = config

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return self.config.name or f"{self.kind} {self.config.path}"

    @property
    def is_streamed(self) -> bool:
        """Whether it is read in the order of its files, since it cannot be indexed; see StreamedSource."""
        return False

    @property
    def size_unit(self) -> str:
        """What its size is counted in; "" if it is not known."""
        if self.is_streamed:
            return ""
        return "tokens" if self.holds == "tokens" else "bytes"

    def files(self) -> list[Path]:
        """Its files, sorted by path; [] if there are none. Hidden files are not found."""
        path = os.path.expanduser(self.config.path)
        if os.path.isfile(path):
            return [Path(path).absolute()]
        if os.path.isdir(path):
            below = glob.iglob(os.path.join(glob.escape(path), "**", "*"), recursive=True)
            found = [file for file in below if file.lower().endswith(self.suffixes)]
        else:
            found = glob.glob(path, recursive=True)
        found = [file for file in found if os.path.isfile(file)]
        return sorted({Path(file).absolute() for file in found}, key=lambda file: file.as_posix())

    def check_keys(self, key: str) -> list[Problem]:  # noqa: ARG002
        """Problems of the table at `key` ("data.sources.0") that this kind alone has; without looking at files."""
        return []

    def check_files(self, key: str) -> list[Problem]:
        """Problems of which files there are, not of what is in them. The keys have no problem."""
        return require(bool(self.config.path and self.files()), *self._no_files(key))

    def check_content(self, key: str, *, vocab_size: int, needs_documents: bool) -> list[Problem]:  # noqa: ARG002
        """Problems of what is in the files, as far as their beginnings show them. The files have no problem.

        vocab_size: of the model; 0 or less: not known. needs_documents: whether attention stays inside documents.
        """
        return []

    def _no_files(self, key: str) -> tuple[str, str, str, str]:
        """key, value, rule and remedy of a source without files."""
        path = self.config.path
        rule = f"a file, a folder that holds {' and '.join(f'*{suffix}' for suffix in self.suffixes)}, or a glob that "
        rule += "matches files"
        if not path:
            rule = f"{rule}; required for kind = {self.kind!r}"
            return f"{key}.path", path, rule, "write where your files are"
        full = os.path.join(os.getcwd(), os.path.expanduser(path))
        return f"{key}.path", path, rule, f"nothing matches {full}: mend the path (relative to the current folder)"

    def pinned_revision(self) -> str:
        """What the source's revision stands for now, so that all ranks and later starts read the same; "" if it has
        none. Raises ConfigError."""
        return ""

    def settings(self) -> dict[str, Any]:
        """The keys that decide which documents, or tokens, its files hold."""
        return {}

    def facts(self, *, document_mask: bool) -> dict[str, Any]:  # noqa: ARG002
        """What the fingerprint of the data says about the source. Raises UserError if a file cannot be read.

        document_mask: whether it matters where documents start, which token files say in files beside them.
        """
        return self._settings_facts() | self._file_facts(self.files())

    def _settings_facts(self) -> dict[str, Any]:
        facts = {"name": self.name, "kind": self.kind, **self.settings()}
        return facts | {"weight": self.config.weight, "epochs": self.config.epochs}

    def _file_facts(self, files: list[Path]) -> dict[str, Any]:
        num_bytes = sum(size for _, size, _ in file_facts(files))
        return {"files": len(files), "bytes": num_bytes, "content": self._content_digest(files)}

    def _content_digest(self, files: list[Path]) -> str:
        """Of the files in their order; from the cache if none of them has changed."""
        folder = cache_folder() / "fingerprint" / content_key(["fingerprint", DIGEST_VERSION, file_facts(files)])

        def build(into: Path) -> None:
            with ThreadPoolExecutor(READERS) as pool:
                digest = xxhash.xxh3_128(b"".join(pool.map(_file_digest, files)))
            (into / "digest.json").write_text(json.dumps(f"xxh3-128:{digest.hexdigest()}"))

        built = built_once(folder, f"the fingerprint of {self.name}", build)
        text: str = json.loads((built / "digest.json").read_text())
        return text


def _file_digest(file: Path) -> bytes:
    """16 bytes, of the file's size and of what `SAMPLED_BLOCKS` says is read of it."""
    try:
        with open(file, "rb") as opened:
            size = opened.seek(0, 2)
            digest = xxhash.xxh3_128(size.to_bytes(8, "little"))
            if size <= SAMPLED_BLOCKS * BLOCK_BYTES:
                begins, length = [0], size
            else:
                last = size - BLOCK_BYTES
                begins, length = [last * n // (SAMPLED_BLOCKS - 1) for n in range(SAMPLED_BLOCKS)], BLOCK_BYTES
            for begin in begins:
                opened.seek(begin)
                digest.update(opened.read(length))
            return digest.digest()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error}") from error


class TextSource(Source):
    """Text in files that are indexed: cut into pieces once, of which any can be read at any time.

    row_name: what a row is called in messages, "line" or "row".
    """

    row_name: ClassVar[str]

    def content_facts(self) -> list[Any]:
        """What changes with the content of its files: paths, sizes and times."""
        return [*file_facts(self.files())]

    def index_settings(self) -> list[Any]:
        """The keys that decide how its files are cut into pieces: a change builds the index anew."""
        config = self.config
        own = [[key, getattr(config, key)] for key in self.keys if key not in (*_INDEX_KEYS, *_FILE_KEYS)]
        return [self.kind, config.field or "text", config.document or "file", config.split or "train", *own]

    def indexed_files(self, into: Path) -> list[Path]:  # noqa: ARG002
        """The files that are indexed. Those that have to be made first are made in the folder `into`."""
        return self.files()

    @abstractmethod
    def scan(self, path: Path, file: int, max_piece_bytes: int) -> Iterator[Piece]:
        """All pieces of a file in order; at least one, a BAD_FILE if there is no row. Holds no file in memory."""

    @abstractmethod
    def read(self, path: Path, piece: Piece) -> str:
        """The piece's text, never empty. Raises BadRowError, and OSError if the file cannot be read."""


class TokenSource(Source):
    """Tokens in files, a sequence at any place of them."""

    holds = "tokens"

    @abstractmethod
    def windows(self, seq_len: int, vocab_size: int, *, documents: bool) -> Corpus:
        """Its pieces, each of which is one sequence. documents: whether they say where documents start."""


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


class StreamedSource(Source):
    """Text in files that are read from their beginning to their end, wherever they lie: no index, nothing on disk."""

    @abstractmethod
    def data_files(self) -> Sequence[str]:
        """Paths or URLs of its files, in order. Raises ConfigError."""

    @property
    @abstractmethod
    def origin(self) -> str:
        """What its files are of, for its description: " at commit …"; "" if that is nothing."""

    @abstractmethod
    def row_groups(self) -> list[Unit]:
        """The units that row groups make. Raises UserError."""

    @abstractmethod
    def rows(self, unit: Unit, first: int, share: Share) -> Iterator[Row]:
        """The share's rows of a unit, in order, from number `first` on. Raises what opening and reading files raises.

        A unit without any row has one bad one, so has what is lost at the end of a damaged file. What lies before
        `first` is skipped: row groups of Parquet are not read, rows inside one are decoded, lines are read and counted.
        """
