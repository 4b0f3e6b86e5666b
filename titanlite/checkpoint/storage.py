"""Save and load tensors with torch's distributed checkpoint (DCP): files are hashed while they are written, contain
only tensors, and are read without executing code."""

import io
import logging
import os
import pickle
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import get_crc32_options, set_crc32_options

from titanlite.checkpoint.grid import DTYPES, MAX_DIMS, Grid
from titanlite.checkpoint.manifest import (
    GRID_FILE,
    METADATA_FILE,
    PART_BYTES,
    FileRecord,
    InvalidCheckpointError,
    Manifest,
    files_of,
    has_manifest,
    read_listed,
    read_manifest,
)
from titanlite.checkpoint.planning import LocalPlanner, PlannedSaves
from titanlite.checkpoint.verified_parts import Part, PartnerError, VerifiedParts, part_bytes, parts_of, share_parts
from titanlite.ranks.agreement import RanksError, describe_failure, run_on_rank_0
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import open_regular
from titanlite.runtime.json_files import read_regular
from titanlite.runtime.torch_internals import is_dtensor, shape_and_offset
from titanlite.storage.address import Address, Place, is_safe_name
from titanlite.storage.store import Store, Upload

_GATHERED_BYTES = 2**18
"""Of writes that are made as one: torch writes each tensor in about 40 pieces, most of them a few bytes."""


class _HashingFile(io.RawIOBase):
    """Hashes a file, in a store its parts too, while it is written sequentially. Small writes wait for `flush`, which
    DCP calls after each tensor.

    The constructor takes an open file instead of a path: if it opened the file and that failed, Python's finalizer
    would call close() on an object without `_file`.
    """

    def __init__(self, file: io.FileIO | Upload) -> None:
        super().__init__()
        self._file = file
        self._hash = xxhash.xxh3_128()
        self._part = self._hash
        """The hash of the part that is written: of the first one, that of the file."""
        self._parts: list[str] = []
        self._bytes = 0
        self._waiting = bytearray()
        self.failure: OSError | UserError | None = None
        """The error of a failed write: torch's archive continues after it and raises a less specific error."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with memoryview(data) as view, view.cast("B") as content:
            if len(self._waiting) + len(content) > _GATHERED_BYTES:
                self.flush()
            if len(content) > _GATHERED_BYTES:
                self._write(content)
            else:
                self._waiting += content
            return len(content)

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, bytearray()
        if waiting:
            with memoryview(waiting) as content:
                self._write(content)

    def _write(self, rest: memoryview) -> None:
        """Write all of it. After a partial write, writing the rest raises the specific error."""
        written = 0
        try:
            while written < len(rest):
                written += self._file.write(rest[written:])
        except (OSError, UserError) as error:
            self.failure = error
            if isinstance(error, OSError) and isinstance(self._file, io.FileIO):
                self.failure = OSError(error.errno, error.strerror, str(self._file.name))
            raise self.failure from None
        self._update(rest)

    def _update(self, data: memoryview) -> None:
        part_bytes = PART_BYTES if isinstance(self._file, Upload) else sys.maxsize
        while len(data):
            content = data[: part_bytes - self._bytes % part_bytes]
            self._hash.update(content)
            if self._part is not self._hash:
                self._part.update(content)
            self._bytes += len(content)
            data = data[len(content) :]
            if self._bytes % part_bytes == 0:
                self._parts.append(self._part.hexdigest())
                self._part = xxhash.xxh3_128()

    def tell(self) -> int:
        return self._bytes + len(self._waiting)

    def fileno(self) -> int:
        self.flush()  # of what the caller syncs
        if isinstance(self._file, io.FileIO):
            return self._file.fileno()
        raise io.UnsupportedOperation("fileno")

    def close(self) -> None:
        self._waiting.clear()  # `record` has written it, unless the file failed
        try:
            if isinstance(self._file, io.FileIO):
                self._file.close()
        finally:
            super().close()

    def record(self, rank: int) -> FileRecord:
        """Write what waits, and describe the file."""
        self.flush()
        parts = self._parts + ([self._part.hexdigest()] if self._bytes > len(self._parts) * PART_BYTES else [])
        return FileRecord(rank, self._bytes, self._hash.hexdigest(), tuple(parts) if len(parts) > 1 else ())


class _HashingFileSystem(FileSystem):
    """Collects a record of each written file."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with self._created(path) as raw, _HashingFile(raw) as file:
            try:
                yield file
            except Exception:
                if file.failure is not None:
                    raise file.failure from None
                raise
            self.records[Path(path).name] = file.record(self._rank)

    @contextmanager
    def _created(self, path: str | os.PathLike[str]) -> Iterator[io.FileIO | Upload]:
        with Path(path).open("xb", buffering=0) as file:
            yield file

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _HashingObjects(_HashingFileSystem):
    """Writes the files as objects below `place`, to which the paths are relative."""

    def __init__(self, rank: int, place: Address) -> None:
        super().__init__(rank)
        self._store = Store(place)

    @contextmanager
    def _created(self, path: str | os.PathLike[str]) -> Iterator[io.FileIO | Upload]:
        with self._store.writer(str(path)) as upload:
            yield upload

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(str(path).removesuffix(".tmp"), mode) as stream:  # an object appears complete
            yield stream

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Nothing: a store has no folders."""

    def exists(self, path: str | os.PathLike[str]) -> bool:  # noqa: ARG002
        return False  # each attempt has a new name

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Nothing: it has its final name."""


class _Writer(dcp.FileSystemWriter):
    """Writes one file per rank, or per tensor. Uses one thread: with several, DCP loses errors."""

    def __init__(self, place: Place, rank: int, saves: PlannedSaves, *, file_per_tensor: bool) -> None:
        super().__init__(
            place if isinstance(place, Path) else Path(),
            single_file_per_rank=not file_per_tensor,
            thread_count=1,
            sync_files=isinstance(place, Path),
            # With copies ahead, DCP waits after each of them, also of tensors on the host, until the device has done
            # all that training has launched.
            per_thread_copy_ahead=0,
        )
        self.files = _HashingFileSystem(rank) if isinstance(place, Path) else _HashingObjects(rank, place)
        self.fs = self.files
        self._saves = saves

    def storage_meta(self) -> None:
        """Return None, so that the metadata do not contain the path of the folder."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's items; the results that are sent to rank 0 are only those that have changed."""
        written = super().write_data(plan, planner).value()
        done = torch.futures.Future[list[WriteResult]]()
        done.set_result(self._saves.results(written))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002
        final = Path(self.path) / self._saves.file
        writing = final.with_name(f"{final.name}.tmp")
        with self.files.create_stream(writing, "wb") as file:
            file.write(self._saves.content(results))
            if self.sync_files:
                os.fsync(file.fileno())
        self.files.rename(writing, final)


def save_tensors(
    place: Place,
    tensors: Mapping[str, Tensor],
    local: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    *,
    saves: PlannedSaves | None = None,
    file_per_tensor: bool = False,
) -> dict[str, FileRecord]:
    """Write `tensors` into the empty `place` and sync each file; returns the records of this rank's files.

    A collective over `group`; None: this process alone. tensors: DTensors, or plain tensors that are equal on all ranks
    that have the name; only their shapes, placements and dtypes are read. local: this rank's shard of each, with the
    data; each is looked up once, when it is written. saves: of the run, so that later saves need no new plan.
    file_per_tensor: DCP then frees each tensor once it is written, not all at the end. Raises RanksError or
    dcp.CheckpointException, a BaseException, on all ranks if one fails.
    """
    saves = PlannedSaves() if saves is None else saves
    writer = _Writer(place, 0 if group is None else dist.get_rank(), saves, file_per_tensor=file_per_tensor)
    planner = LocalPlanner(local, saves)
    crc32 = get_crc32_options()
    set_crc32_options(False)  # torch's checksum of each tensor is slower and weaker than HASH
    try:
        planner.agree(tensors, group)
        with _ignore_no_group_warning():
            dcp.save(dict(tensors), storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    except BaseException:
        saves.forget()
        raise
    finally:
        set_crc32_options(crc32)
    return writer.files.records


def load_tensors(
    place: Place, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None, *, on_all: Collection[str] = ()
) -> None:
    """Fill `tensors` in place from the files of the checkpoint at `place`, written by any mesh.

    A collective over `group`; None: this process alone. on_all: names of plain tensors on the host that all ranks load:
    rank 0 reads them and broadcasts them. Raises dcp.CheckpointException, a BaseException, on all ranks if a tensor is
    missing or has another shape.
    """
    reads_all = group is None or dist.get_rank(group) == 0
    with _ignore_no_group_warning(), _no_logged_tracebacks():
        dcp.load(
            {name: tensor for name, tensor in tensors.items() if reads_all or name not in on_all},
            storage_reader=_Reader(place, group),
            planner=_TensorPlanner(),
            process_group=group,
            no_dist=group is None,
        )
    if group is not None:
        for name in on_all:
            dist.broadcast(tensors[name], group=group, group_src=0)


def first_failure(error: dcp.CheckpointException) -> RanksError:
    """Convert DCP's error on all ranks to that of the first failed rank."""
    rank, (cause, _) = min(error.failures.items())
    return RanksError(f"rank {rank}: {describe_failure(cause)}")


@contextmanager
def _ignore_no_group_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


@contextmanager
def _no_logged_tracebacks() -> Iterator[None]:
    """DCP raises the error of unreadable metadata, and before logs it twice, with tracebacks, by the root logger."""
    root = logging.getLogger()

    def has_no_traceback(record: logging.LogRecord) -> bool:
        return not record.exc_info

    root.addFilter(has_no_traceback)  # only for lines of the root logger itself
    try:
        yield
    finally:
        root.removeFilter(has_no_traceback)


def read_shapes(place: Place) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, dtype) of the tensors of the checkpoint at `place`. Raises InvalidCheckpointError."""
    found = _Reader(place).read_metadata().state_dict_metadata
    return {
        name: (tuple(entry.size), str(entry.properties.dtype))
        for name, entry in found.items()
        if isinstance(entry, TensorStorageMetadata)
    }


class _TensorPlanner(dcp.DefaultLoadPlanner):
    """Loads tensors only: any other value would be a pickle."""

    def create_local_plan(self) -> dcp.LoadPlan:
        assert self.metadata is not None
        if isinstance(grid := self.metadata.planner_data, Grid):
            self._add_blocks(grid, self.metadata)
        return super().create_local_plan()

    def _add_blocks(self, grid: Grid, metadata: Metadata) -> None:
        """Add the blocks that this rank needs to metadata without any."""
        for name, tensor in self.state_dict.items():
            entry = metadata.state_dict_metadata.get(name)
            if not isinstance(entry, TensorStorageMetadata) or entry.size != tensor.shape:
                continue
            if is_dtensor(tensor) and tensor.device_mesh.get_coordinate() is None:
                continue
            shape, offset = shape_and_offset(tensor) if is_dtensor(tensor) else (tensor.shape, (0,) * tensor.dim())
            for block in grid.blocks(name, offset, shape):
                entry.chunks.append(ChunkStorageMetadata(torch.Size(block.offset), torch.Size(block.sizes)))
                metadata.storage_data[MetadataIndex(name, block.offset)] = ShardPlace(
                    block.name, block.start, block.length
                )

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> NoReturn:  # noqa: ARG002
        raise InvalidCheckpointError(f"{read_item.dest_index.fqn} is not a tensor")


class ShardPlace(NamedTuple):
    """Where a shard is, for DCP's reader."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str] = ()


class _VerifiedObject(io.RawIOBase):
    """Reads an object of a checkpoint by its parts, from its beginning to its end."""

    def __init__(self, parts: VerifiedParts, name: str, record: FileRecord) -> None:
        super().__init__()
        self._parts = parts
        self._name = name
        self._record = record
        self._last: tuple[int, int, bytearray] = (0, 0, bytearray())

    def read_at(self, start: int, length: int) -> bytearray:
        """`length` bytes from byte `start` on. The last content is kept: a tensor may be read for several shards."""
        if self._last[:2] != (start, length):
            content = bytearray()
            for part in parts_of(self._name, self._record, start, length):
                offset = start + len(content) - part.number * part_bytes(self._record)
                content += self._parts.get(part)[offset : offset + length - len(content)]
            self._last = start, length, content
        return self._last[2]


class _VerifiedObjects(FileSystem):
    """Opens the files of a checkpoint in a store."""

    def __init__(self, parts: VerifiedParts, records: Mapping[str, FileRecord]) -> None:
        self._parts = parts
        self._records = records

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:  # noqa: ARG002
        with _VerifiedObject(self._parts, str(path), self._records[str(path)]) as file:
            yield file


def _files_at(place: Place) -> tuple[Manifest | None, Place, str]:
    """The manifest of the checkpoint at `place`, if it is needed, where its files are, and the name of its metadata."""
    found = [file for file in (GRID_FILE, METADATA_FILE) if isinstance(place, Path) and (place / file).exists()]
    if isinstance(place, Path) and (found == [METADATA_FILE] or not has_manifest(place)):
        return None, place, found[0] if found else METADATA_FILE
    manifest = read_manifest(place)
    return manifest, files_of(place, manifest), manifest.metadata_file


def _metadata_content(place: Place, files: Place, manifest: Manifest | None, name: str) -> bytes:
    """The content of the metadata. files, manifest, name: see _files_at."""
    if isinstance(files, Path):
        if name == GRID_FILE:
            return read_regular(files / name)
        with open_regular(files / name) as file:
            return file.read()
    assert manifest is not None, "a checkpoint in a store has one"
    return read_listed(place, manifest, name)


class _Reader(dcp.FileSystemReader):
    """Reads DCP's metadata, a pickle, through an allow-list of the names that valid metadata contain.

    In a store, each file is read by parts, in the order in which they stand; see VerifiedParts.
    """

    def __init__(self, place: Place, group: dist.ProcessGroup | None = None) -> None:
        """With a group, a collective: rank 0 reads the manifest and the metadata, and sends them."""
        self._group = group
        self._items: list[dcp.planner.ReadItem] = []
        self._failure: Exception = PartnerError()
        """Why there are no metadata, on the rank that reads them."""

        def look() -> tuple[Manifest | None, Place, str, bytes | None]:
            manifest, files, name = _files_at(place)
            try:
                return manifest, files, name, _metadata_content(place, files, manifest, name)
            except Exception as error:
                self._failure = error
                return manifest, files, name, None

        found = look() if group is None else run_on_rank_0(look, group)
        self._manifest, self._files, self._metadata_file, self._content = found
        super().__init__(self._files if isinstance(self._files, Path) else Path())

    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        """Keep this rank's items: the others need to know only which parts of files it needs."""
        self._items = plan.items
        parts = set[Part]()
        if isinstance(self._files, Address) and self._manifest is not None:
            files = self._manifest.files
            for index in {item.storage_index for item in plan.items}:
                stored = self.storage_data[index]
                if (name := stored.relative_path) not in files:
                    raise InvalidCheckpointError(
                        f"{self._metadata_file} names {name}, which the manifest does not list"
                    )
                parts.update(parts_of(name, files[name], stored.offset, stored.length))
        return dcp.LoadPlan([], storage_data=sorted(parts))

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        """Called on one rank, with the plans of all: decides which rank reads which part."""
        if isinstance(self._files, Path) or self._manifest is None:
            return plans
        shares = share_parts([plan.storage_data for plan in plans], self._manifest.files)
        return [replace(plan, storage_data=each) for plan, each in zip(plans, shares, strict=True)]

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> torch.futures.Future[None]:
        if isinstance(self._files, Path) or self._manifest is None:
            return super().read_data(replace(plan, items=self._items), planner)
        files = self._manifest.files
        items = [(self.storage_data[item.storage_index], item) for item in self._items]
        items.sort(key=lambda pair: (pair[0].relative_path, pair[0].offset))
        parts = VerifiedParts(Store(self._files), files, plan.storage_data, self._group)
        self.fs = _VerifiedObjects(parts, files)
        try:
            return super().read_data(replace(plan, items=[item for _, item in items]), planner)
        except PartnerError:
            done = torch.futures.Future[None]()
            done.set_result(None)
            return done
        finally:
            parts.close()

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        if isinstance(file, _VerifiedObject):
            return io.BytesIO(file.read_at(sinfo.offset, sinfo.length))
        return super()._slice_file(file, sinfo)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        try:
            content = self._content
            if content is None:
                raise self._failure
            if self._metadata_file == GRID_FILE:
                return self._of_grid(Grid(content))
            _require_known_opcodes(content)
            metadata = _MetadataUnpickler(io.BytesIO(content)).load()
            if not isinstance(metadata, Metadata) or not _has_fitting_values(metadata, len(content)):
                raise InvalidCheckpointError(f"{METADATA_FILE} does not contain the metadata of a checkpoint")
            for name in (stored.relative_path for stored in metadata.storage_data.values()):
                if not is_safe_name(name) or "/" in name:
                    raise InvalidCheckpointError(f"{METADATA_FILE} names {name!r}, outside the checkpoint")
        except (InvalidCheckpointError, PartnerError, UserError):
            raise
        except Exception as error:  # a corrupted pickle can raise any
            name = self._metadata_file
            raise InvalidCheckpointError(f"{name} cannot be read: {type(error).__name__}: {error}") from None
        return metadata

    def _of_grid(self, grid: Grid) -> Metadata:
        """The metadata without any shards, for _TensorPlanner."""
        if self._manifest is not None:
            grid.require_bytes(sum(file.bytes for file in self._manifest.files.values()))
        else:  # a folder
            grid.require_bytes(sum(file.stat().st_size for file in Path(self.path).iterdir()))
        entries = {
            name: TensorStorageMetadata(TensorProperties(grid.dtype(name)), torch.Size(tensor["shape"]), [])
            for name, tensor in grid.tensors.items()
        }
        return Metadata({**entries}, planner_data=grid, storage_data={})


def _has_fitting_values(found: Metadata, num_bytes: int) -> bool:
    """Whether all values that are read have their types: a pickle can give any. An attribute may even be missing.

    num_bytes: of the pickle. Tensors that share a list of chunks could have many more chunks.
    """
    entries = found.state_dict_metadata.values()
    tensors = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
    return (
        sum(len(entry.chunks) for entry in tensors) <= num_bytes
        and all(isinstance(name, str) and _is_tensor(entry) for name, entry in found.state_dict_metadata.items())
        and all(isinstance(index, MetadataIndex) for index in found.storage_data)
        and all(
            isinstance(stored.relative_path, str) and _are_sizes((stored.offset, stored.length))
            for stored in found.storage_data.values()
        )
    )


def _is_tensor(entry: Any) -> bool:
    return (
        isinstance(entry, TensorStorageMetadata)
        and entry.properties.dtype in DTYPES
        and _are_sizes(entry.size)
        and all(_are_sizes(chunk.offsets) and _are_sizes(chunk.sizes) for chunk in entry.chunks)
    )


def _are_sizes(values: Collection[Any]) -> bool:
    return len(values) <= MAX_DIMS and all(type(value) is int and 0 <= value < 2**63 for value in values)


_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch", str(dtype).removeprefix("torch.")) for dtype in DTYPES),
}


_OPCODES = re.compile(
    rb"(?:[)\x85\x86\x87t(\x81b}suR\x88\x89\]ae\x93\x94N.]"  # without an argument
    rb"|[\x80hK].|M..|[jJ].{4}|\x95.{8}){1,1000}",
    re.DOTALL,
)
"""Opcodes with arguments of fixed sizes, of those that Python 3.8 and later write into metadata."""
_COUNTED = {0x8A: 1, 0x8C: 1, ord("X"): 4}
"""LONG1, SHORT_BINUNICODE and BINUNICODE -> the bytes of the size of their argument, which stands before it."""


def _require_known_opcodes(content: bytes) -> None:
    """Raise InvalidCheckpointError if a pickle has opcodes that no metadata have: LONG_BINPUT makes pickle allocate any
    amount of memory."""
    place = 0
    while place < len(content):
        if found := _OPCODES.match(content, place):
            place = found.end()
        elif (width := _COUNTED.get(content[place])) is not None:
            place += 1 + width + int.from_bytes(content[place + 1 : place + 1 + width], "little")
        else:
            opcode = content[place : place + 1]
            raise InvalidCheckpointError(
                f"{METADATA_FILE} cannot be read: it has the opcode {opcode!r}, which is not allowed"
            )


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return self._member
        if (module, name) not in _ALLOWED:
            raise InvalidCheckpointError(f"{METADATA_FILE} names {module}.{name}, which is not allowed")
        return super().find_class(module, name)

    def _member(self, *arguments: Any) -> Any:
        """In place of getattr, by which Python 3.11.0 to 3.11.3 pickle members of an enumeration."""
        encodings = self.find_class(f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING")
        if len(arguments) != 2 or arguments[0] is not encodings:
            raise InvalidCheckpointError(f"{METADATA_FILE} names builtins.getattr, which is not allowed")
        return encodings[arguments[1]]
