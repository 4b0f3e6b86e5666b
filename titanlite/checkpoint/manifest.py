"""MANIFEST.json: a checkpoint's metadata and the size and hash of each file. A folder without it is incomplete.

Does not import DCP, which is slow.
"""

import errno
import json
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import xxhash
from pydantic import AfterValidator, ConfigDict, Field, GetPydanticSchema, with_config
from typing_extensions import TypedDict

from titanlite.runtime.cache import content_key, hash_of
from titanlite.runtime.durability import write_file
from titanlite.runtime.json_files import JsonError, of_type, parse_json, read_regular
from titanlite.storage.address import Address, Place, is_safe_name
from titanlite.storage.store import LargeObjectError, Store

MANIFEST_FILE = "MANIFEST.json"
HASH = "xxh3-128"
METADATA_FILE = ".metadata"
GRID_FILE = "GRID.json"
"""In place of METADATA_FILE in checkpoints of very many shards."""
FORMAT_VERSION = 3
"""Incremented with every change that older versions of titanlite cannot read."""
STORE_FORMAT_VERSION = 4
"""Of a checkpoint in a store, also of its copy in a folder: the files are below the manifest's `attempt`."""
GRID_FORMAT_VERSION = 5
"""Of a checkpoint with GRID_FILE, in a folder or a store."""
PART_BYTES = 2**26
"""Size of the parts of a file that have a hash each, so that a part can be verified alone. A constant of the format."""


ROPE_PREFIX = "rope_"
"""Of the hyper-parameters of rotary embeddings, which a stage of the training may change."""


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
        formats = f"{FORMAT_VERSION} to {GRID_FORMAT_VERSION}"
        super().__init__(f"its format version is {version}, this titanlite reads {formats} only: {remedy}")


@dataclass(frozen=True)
class FileRecord:
    """A written file. rank: the rank that wrote it. hash: HASH, in hex. parts: in a store, the hashes of its parts of
    PART_BYTES, of which the last is shorter; () if it has only one."""

    rank: int
    bytes: int
    hash: str
    parts: tuple[str, ...] = ()


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


_Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Counts(TypedDict):
    """The fields of MeterState."""

    tokens_seen: _Count
    skipped_steps: _Count
    by_source: dict[str, list[float]]
    interval: Annotated[list[float], Field(min_length=2, max_length=2)]


@with_config(ConfigDict(extra="allow"))
class _DataFacts(TypedDict):
    sources: NotRequired[list[dict[str, Any]]]


@with_config(ConfigDict(extra="allow"))
class _StageFacts(TypedDict):
    from_step: int


@with_config(ConfigDict(extra="allow"))
class _Facts(TypedDict):
    """The facts that the start of a run looks into."""

    data: NotRequired[_DataFacts]
    model: NotRequired[dict[str, Any]]
    stages: NotRequired[dict[str, _StageFacts]]


def _with_fitting_values(config: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Raise ValueError unless what is looked into before a configuration is read has its type."""
    sources, plugins = config.get("data", {}).get("sources", []), config.get("job", {}).get("plugins", [])
    for name in ("overrides", "kept"):
        if not isinstance(config.get("model", {}).get(name, {}), dict):
            raise ValueError(f"model.{name} is not a table")
    if not isinstance(sources, list) or not all(isinstance(source, dict) for source in sources):
        raise ValueError("data.sources is not a list of tables")
    if not isinstance(plugins, list) or not all(isinstance(plugin, str) for plugin in plugins):
        raise ValueError("job.plugins is not a list of strings")
    stages = config.get("training", {}).get("stages", [])
    if not isinstance(stages, list) or not all(isinstance(row, dict) and _is_stage(row) for row in stages):
        raise ValueError("training.stages is not a list of tables with a first step and numbers")
    return config


def _is_stage(row: Mapping[str, Any]) -> bool:
    """Whether a resolved table of training.stages has a first step, and numbers for the rotary embeddings."""
    rope = (value for key, value in row.items() if key.startswith(ROPE_PREFIX))
    return type(row.get("from_step")) is int and all(type(value) in (int, float) for value in rope)


StoredConfig = Annotated[dict[str, dict[str, Any]], AfterValidator(_with_fitting_values)]
"""Schema of a resolved configuration in a stored file, by section."""


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
    config: the resolved configuration. versions: of the software, and the kind of device. created: UTC time. files: all
    files of the folder except MANIFEST.json. With training.bit_equal, digest: of the weights; computations: of the run
    so far. attempt: in a store, name of the folder of the files; see files_of.
    """

    step: int
    content: Literal["full", "model"]
    lineage: tuple[Branch, ...]
    counts: Annotated[Mapping[str, Any], _stored(_Counts)]
    facts: Annotated[Mapping[str, Any], _stored(_Facts)]
    config: Annotated[Mapping[str, Any], _stored(StoredConfig)]
    versions: Mapping[str, Any]
    created: str
    files: Mapping[str, FileRecord]
    format: int = FORMAT_VERSION
    digest: str = ""
    computations: tuple[Computation, ...] = ()
    attempt: str = ""

    @property
    def metadata_file(self) -> str:
        """The name of the file that says where each tensor is."""
        return GRID_FILE if self.format == GRID_FORMAT_VERSION else METADATA_FILE

    @property
    def model(self) -> dict[str, Any]:
        """The family and the hyper-parameters of the model at the step. `facts` has those of the first stage of the
        training: here, stages that have begun have changed the rotary embeddings."""
        model = dict(self.facts.get("model", {}))
        for row in self.config.get("training", {}).get("stages", ()):
            if row["from_step"] <= self.step:
                given = {key: value for key, value in row.items() if key.startswith(ROPE_PREFIX) and value != -1}
                model |= {key: value for key, value in given.items() if key in model}
        return model


_IF_GIVEN = ("digest", "computations", "attempt")


def manifest_text(manifest: Manifest) -> bytes:
    """The content of MANIFEST.json."""
    content = {key: value for key, value in asdict(manifest).items() if key not in _IF_GIVEN or value}
    for record in content["files"].values():
        if not record["parts"]:
            del record["parts"]
    text = json.dumps(content | {"hash": {HASH: _NO_HASH}}, indent=1) + "\n"
    return _replace_last(text, _NO_HASH, _digest(text.encode())).encode()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write MANIFEST.json and sync it to disk. Raises OSError."""
    write_file(folder / MANIFEST_FILE, manifest_text(manifest))


def has_manifest(place: Place) -> bool:
    """Whether `place` is a checkpoint, and no folder of checkpoints."""
    return Store(place).exists(MANIFEST_FILE) if isinstance(place, Address) else (place / MANIFEST_FILE).exists()


def read_manifest(place: Place) -> Manifest:
    """Read and verify MANIFEST.json.

    Raises InvalidCheckpointError if it is missing or corrupted, UnknownFormatError if it has another format, and
    OSError if reading fails.
    """
    try:
        raw = _read(place / MANIFEST_FILE)
        seal = parse_json(raw, _Seal)
        digest = seal["hash"][HASH]
        if _digest(_replace_last(raw.decode("utf-8"), digest, _NO_HASH).encode()) != digest:
            raise InvalidCheckpointError(f"{MANIFEST_FILE} has changed since it was written: its {HASH} differs")
        if seal["format"] not in (FORMAT_VERSION, STORE_FORMAT_VERSION, GRID_FORMAT_VERSION):
            raise UnknownFormatError(seal["format"])
        manifest: Manifest = of_type(raw, Manifest)
        branches = (branch.id for branch in manifest.lineage)  # a superseded checkpoint is renamed by it
        for name in (*manifest.files, manifest.attempt or METADATA_FILE, *branches):
            if not is_safe_name(name) or "/" in name:
                raise JsonError(f"lists {name!r}, which is not the plain name of a file")
        if not manifest.lineage:
            raise JsonError("has no lineage")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise InvalidCheckpointError(f"{MANIFEST_FILE} is missing") from None
    except JsonError as error:
        raise InvalidCheckpointError(f"{MANIFEST_FILE} cannot be read: it {error}") from None
    except (KeyError, ValueError):
        raise InvalidCheckpointError(f"{MANIFEST_FILE} cannot be read: it is truncated or corrupted") from None
    if manifest.metadata_file not in manifest.files:
        raise InvalidCheckpointError(f"{MANIFEST_FILE} does not list {manifest.metadata_file}")
    return manifest


def files_of(place: Place, manifest: Manifest) -> Place:
    """Where the files of the checkpoint at `place` are. In a store, those of step-N.invalid-... are still below step-N,
    since nothing is renamed there."""
    if isinstance(place, Address) and (renamed := re.match(r"(step-\d+)\.(invalid|superseded)-", place.name)):
        place = place.with_name(renamed[1])
    return place / manifest.attempt if manifest.attempt else place


def manifest_hash(place: Place) -> str:
    """The hash of MANIFEST.json with its own hash. Raises OSError."""
    return _digest(_read(place / MANIFEST_FILE))


def read_listed(place: Place, manifest: Manifest, name: str) -> bytes:
    """The content of a small file that the manifest lists. Raises OSError, JsonError if it is no regular file or is
    large, InvalidCheckpointError if its content in a store is another one."""
    content = _read(files_of(place, manifest) / name)
    if isinstance(place, Address) and _digest(content) != manifest.files[name].hash:
        raise InvalidCheckpointError(f"{name} has changed since it was written: its {HASH} differs")
    return content


def _read(place: Place) -> bytes:
    """The content of a small file. Raises OSError, and JsonError if it is not small."""
    if isinstance(place, Path):
        return read_regular(place)
    try:
        return Store(place).read()
    except LargeObjectError as error:
        raise JsonError(error.damage) from None


def write_recorded(place: Place, content: bytes) -> FileRecord:
    """Write a new small file, from rank 0, and sync it to disk. Raises OSError."""
    if isinstance(place, Address):
        Store(place.parent).write(place.name, content)
    else:
        write_file(place, content)
    return FileRecord(0, len(content), _digest(content))


def check_files(place: Place, manifest: Manifest, *, content: bool = True) -> None:
    """Check all files of a checkpoint. Raises InvalidCheckpointError, OSError.

    content: see check_file. In a store, only sizes are checked: each part is verified when it is read.
    """
    files = files_of(place, manifest)
    if isinstance(files, Path):
        for name, record in manifest.files.items():
            check_file(files, name, record, content=content)
        return
    found = Store(files).list()
    for name, record in manifest.files.items():
        if name not in found:
            raise InvalidCheckpointError(f"{_described(name, record)} is missing")
        if found[name].bytes != record.bytes:
            raise InvalidCheckpointError(_other_size(name, record, found[name].bytes))


def _described(name: str, record: FileRecord) -> str:
    return f"{name} (written by rank {record.rank})"


def _other_size(name: str, record: FileRecord, size: int) -> str:
    return f"{_described(name, record)} has {size:,} bytes instead of {record.bytes:,}"


def changed(name: str, record: FileRecord) -> InvalidCheckpointError:
    return InvalidCheckpointError(f"{_described(name, record)} has changed since it was written: its {HASH} differs")


def check_file(folder: Path, name: str, record: FileRecord, *, content: bool = True) -> None:
    """Check a file against its record. Raises InvalidCheckpointError if it differs, OSError if it cannot be read.

    content: whether to check the hash, too, and not only the size.
    """
    where = _described(name, record)
    try:
        facts = (folder / name).stat()
        size = facts.st_size
        if not stat.S_ISREG(facts.st_mode):
            raise InvalidCheckpointError(f"{where} is not a regular file")
        if size != record.bytes:
            raise InvalidCheckpointError(_other_size(name, record, size))
        if content and hash_of(folder / name) != record.hash:
            raise changed(name, record)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
            raise InvalidCheckpointError(f"{where} is missing") from None
        if error.errno == errno.EIO:
            raise InvalidCheckpointError(f"{where} cannot be read: {error.strerror}") from None
        raise


def copy_id(place: Place) -> list[int]:
    """Facts about the copy of a checkpoint that this process reads, the inode and ctime of MANIFEST.json, if any.

    They are equal on nodes that share a file system, and differ between copies. [] in a store, which all nodes share.
    """
    if isinstance(place, Address):
        return []
    try:
        facts = (place / MANIFEST_FILE).stat()
    except OSError:
        return []
    return [facts.st_ino, facts.st_ctime_ns]


_NO_HASH = "0" * 32
"""Placeholder for the manifest's own hash while it is computed."""


def _replace_last(text: str, old: str, new: str) -> str:
    """Replace the last occurrence, the hash: a setting may contain the same text. Raises ValueError if `old` is ""."""
    before, _, behind = text.rpartition(old)
    return before + new + behind


def _digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)
