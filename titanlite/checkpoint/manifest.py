"""MANIFEST.json: a checkpoint's metadata and the size and hash of each file. A folder without it is incomplete.

Does not import DCP, which is slow.
"""

import errno
import json
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NotRequired

import xxhash
from pydantic import ConfigDict, GetPydanticSchema, with_config
from typing_extensions import TypedDict

from titanlite.runtime.cache import content_key, hash_of
from titanlite.runtime.durability import write_file
from titanlite.runtime.json_files import JsonError, of_type, parse_json, read_regular

MANIFEST_FILE = "MANIFEST.json"
HASH = "xxh3-128"
METADATA_FILE = ".metadata"
FORMAT_VERSION = 3
"""The only format that is read; incremented with every change that older versions of titanlite cannot read."""


class InvalidCheckpointError(Exception):
    """A checkpoint is incomplete or corrupted. The text is one line: file, the rank that wrote it, and the damage."""


class UnknownFormatError(Exception):
    """The checkpoint has a newer or older format; it is not corrupted and must not be quarantined or deleted."""

    def __init__(self, version: int) -> None:
        remedy = "use a newer titanlite"
        if version < FORMAT_VERSION:
            remedy = (
                'use the titanlite that wrote it; "titanlite convert export" of that version writes a Hugging Face '
                "folder, from which checkpoint.initial_load_path starts a new run"
            )
        super().__init__(f"its format version is {version}, this titanlite reads {FORMAT_VERSION} only: {remedy}")


@dataclass(frozen=True)
class FileRecord:
    """A written file. rank: the rank that wrote it. hash: HASH, in hex."""

    rank: int
    bytes: int
    hash: str


@dataclass(frozen=True)
class Branch:
    """One branch of a run's history. id: a random name. step: the last step of the previous branch; 0: the start.

    launch: torchrun's run id of the launch that created the branch; restarts of a launch have the same id. "" if the
    launch has no unique id.
    """

    id: str
    step: int
    launch: str = ""


@dataclass(frozen=True)
class Computation:
    """What computes the steps after `step`, with training.bit_equal: other facts give other bits. facts: by name."""

    step: int
    facts: Mapping[str, str]

    @property
    def id(self) -> str:
        return content_key(self.facts)[:6]

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.facts.items()) or "without training.bit_equal"


def computed_by(computations: Iterable[Computation]) -> str:
    """The ids of what has computed a run, in order."""
    return ", ".join(each.id for each in computations)


class _Counts(TypedDict):
    """The fields of MeterState."""

    tokens_seen: int
    skipped_steps: int
    by_source: dict[str, list[float]]
    interval: list[float]


@with_config(ConfigDict(extra="allow"))
class _DataFacts(TypedDict):
    sources: NotRequired[list[dict[str, Any]]]


@with_config(ConfigDict(extra="allow"))
class _Facts(TypedDict):
    """The facts that the start of a run looks into."""

    data: NotRequired[_DataFacts]
    model: NotRequired[dict[str, Any]]


class _Seal(TypedDict):
    """What describes MANIFEST.json itself. hash: its own, by HASH."""

    format: int
    hash: dict[str, str]


def _stored(kind: Any) -> Any:
    """Marks a mapping that MANIFEST.json has as this TypedDict."""
    return GetPydanticSchema(lambda _, handler: handler(kind))


@dataclass(frozen=True)
class Manifest:
    """The content of MANIFEST.json.

    step: optimizer steps done. content: "full", or "model" for parameters only. lineage: branches of the run, latest
    last. counts: running totals of the meter, by name. facts: values compared at a resume (see compatibility.py).
    config: the resolved configuration. versions: of the software. created: UTC time. files: all files of the folder
    except MANIFEST.json. With training.bit_equal, digest: of the weights; computations: of the run so far.
    """

    step: int
    content: Literal["full", "model"]
    lineage: tuple[Branch, ...]
    counts: Annotated[Mapping[str, Any], _stored(_Counts)]
    facts: Annotated[Mapping[str, Any], _stored(_Facts)]
    config: Annotated[Mapping[str, Any], _stored(dict[str, dict[str, Any]])]
    versions: Mapping[str, Any]
    created: str
    files: Mapping[str, FileRecord]
    format: int = FORMAT_VERSION
    digest: str = ""
    computations: tuple[Computation, ...] = ()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write MANIFEST.json and sync it to disk. Raises OSError."""
    content = {key: value for key, value in asdict(manifest).items() if key not in ("digest", "computations") or value}
    text = json.dumps(content | {"hash": {HASH: _NO_HASH}}, indent=1) + "\n"
    text = _replace_last(text, _NO_HASH, _digest(text))
    write_file(folder / MANIFEST_FILE, text.encode())


def read_manifest(folder: Path) -> Manifest:
    """Read and verify MANIFEST.json.

    Raises InvalidCheckpointError if it is missing or corrupted, UnknownFormatError if it has another format, and
    OSError if reading fails.
    """
    try:
        raw = read_regular(folder / MANIFEST_FILE)
        seal = parse_json(raw, _Seal)
        digest = seal["hash"][HASH]
        if _digest(_replace_last(raw.decode("utf-8"), digest, _NO_HASH)) != digest:
            raise InvalidCheckpointError(f"{MANIFEST_FILE} has changed since it was written: its {HASH} differs")
        if seal["format"] != FORMAT_VERSION:
            raise UnknownFormatError(seal["format"])
        manifest: Manifest = of_type(raw, Manifest)
        for name in manifest.files:
            if PurePosixPath(name).name != name or name in ("", ".", "..") or "\0" in name:
                raise JsonError(f"lists {name!r}, which is not the plain name of a file")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise InvalidCheckpointError(f"{MANIFEST_FILE} is missing") from None
    except JsonError as error:
        raise InvalidCheckpointError(f"{MANIFEST_FILE} cannot be read: it {error}") from None
    except (KeyError, ValueError):
        raise InvalidCheckpointError(f"{MANIFEST_FILE} cannot be read: it is truncated or corrupted") from None
    if METADATA_FILE not in manifest.files:
        raise InvalidCheckpointError(f"{MANIFEST_FILE} does not list {METADATA_FILE}")
    return manifest


def write_recorded(path: Path, content: bytes) -> FileRecord:
    """Write a new small file, from rank 0, and sync it to disk. Raises OSError."""
    write_file(path, content)
    return FileRecord(0, len(content), hash_of(path))


def check_file(folder: Path, name: str, record: FileRecord, *, content: bool = True) -> None:
    """Check a file against its record. Raises InvalidCheckpointError if it differs, OSError if it cannot be read.

    content: whether to check the hash, too, and not only the size.
    """
    where = f"{name} (written by rank {record.rank})"
    try:
        facts = (folder / name).stat()
        size = facts.st_size
        if not stat.S_ISREG(facts.st_mode):
            raise InvalidCheckpointError(f"{where} is not a regular file")
        if size != record.bytes:
            raise InvalidCheckpointError(f"{where} has {size:,} bytes instead of {record.bytes:,}")
        if content and hash_of(folder / name) != record.hash:
            raise InvalidCheckpointError(f"{where} has changed since it was written: its {HASH} differs")
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
            raise InvalidCheckpointError(f"{where} is missing") from None
        if error.errno == errno.EIO:
            raise InvalidCheckpointError(f"{where} cannot be read: {error.strerror}") from None
        raise


def copy_id(folder: Path) -> list[int]:
    """Facts about the copy of a checkpoint that this process reads, the inode and ctime of MANIFEST.json, if any.

    They are equal on nodes that share a file system, and differ between copies.
    """
    try:
        facts = (folder / MANIFEST_FILE).stat()
    except OSError:
        return []
    return [facts.st_ino, facts.st_ctime_ns]


_NO_HASH = "0" * 32
"""Placeholder for the manifest's own hash while it is computed."""


def _replace_last(text: str, old: str, new: str) -> str:
    """Replace the last occurrence, the hash: a setting may contain the same text. Raises ValueError if `old` is ""."""
    before, _, behind = text.rpartition(old)
    return before + new + behind


def _digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())
