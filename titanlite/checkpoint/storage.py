"""Tensors to and from the files of one folder, by torch's distributed checkpoint (DCP): hashed while they are written,
tensors only, and read without executing anything."""

import errno
import io
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.serialization import get_crc32_options, set_crc32_options

from titanlite.checkpoint.config import Verify
from titanlite.runtime.agreement import RanksError, describe_failure

HASH = "xxh3-128"
METADATA_FILE = ".metadata"
_BLOCK_BYTES = 2**22


class InvalidCheckpointError(Exception):
    """A checkpoint is damaged; the text says where: file, the rank that wrote it, and what is wrong, in one line."""


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written. rank: of the job that wrote it. hash: HASH, in hex."""

    rank: int
    bytes: int
    hash: str


class _HashingFile(io.RawIOBase):
    """Hashes an open file as it is written, from front to end.

    The caller opens `file`: an object whose constructor fails is closed as well, when it is collected.
    """

    def __init__(self, file: io.FileIO) -> None:
        super().__init__()
        self._file = file
        self._hash = xxhash.xxh3_128()
        self._bytes = 0
        self.failure: OSError | None = None
        """Why a write has failed: torch's archive goes on to its end then, and raises something less telling there."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """All of `data`: where the disk takes a part, the rest is written again, which tells what is wrong."""
        with memoryview(data) as view, view.cast("B") as rest:
            written = 0
            try:
                while written < len(rest):
                    written += self._file.write(rest[written:])
            except OSError as error:
                self.failure = OSError(error.errno, error.strerror, str(self._file.name))
                raise self.failure from None
            self._hash.update(rest)
            self._bytes += written
            return written

    def tell(self) -> int:
        return self._bytes

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        try:
            self._file.close()
        finally:
            super().close()

    def record(self, rank: int) -> FileRecord:
        return FileRecord(rank, self._bytes, self._hash.hexdigest())


class _HashingFileSystem(FileSystem):
    """Notes a record of each file that it writes."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _HashingFile(Path(path).open("xb", buffering=0)) as file:
            try:
                yield file
            except Exception:
                if file.failure is not None:
                    raise file.failure from None
                raise
            self.records[Path(path).name] = file.record(self._rank)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _Writer(dcp.FileSystemWriter):
    """One file per rank, or per tensor. More threads than one would lose the errors of the others."""

    def __init__(self, folder: Path, files: _HashingFileSystem, *, file_per_tensor: bool) -> None:
        super().__init__(folder, single_file_per_rank=not file_per_tensor, thread_count=1, sync_files=True)
        self.fs = files

    def storage_meta(self) -> None:
        """Nothing: the path where it was written is nobody's business."""


class _LocalPlanner(dcp.DefaultSavePlanner):
    """Plans with the tensors of the run, and takes the data from `local`: this rank's part of each, wherever it is."""

    def __init__(self, local: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._local = local

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._local[index.fqn]


def save_tensors(
    folder: Path,
    tensors: Mapping[str, Tensor],
    local: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    *,
    file_per_tensor: bool = False,
) -> dict[str, FileRecord]:
    """Writes `tensors` into the empty `folder`, together with the other ranks of `group`, or this process alone for
    None; each file is on the disk on return. Returns the records of the files that this rank has written.

    tensors: DTensors, or plain ones that are equal on all ranks that have the name; only their shapes, placements and
    dtypes are read. local: this rank's part of each, with the data; each is asked for once, when it is written.
    file_per_tensor: DCP then lets go of each tensor once it is written, and not of all in the end. Where a rank fails,
    dcp.CheckpointException is raised on all, which is a BaseException.
    """
    files = _HashingFileSystem(0 if group is None else dist.get_rank())
    writer, planner = _Writer(folder, files, file_per_tensor=file_per_tensor), _LocalPlanner(local)
    crc32 = get_crc32_options()
    set_crc32_options(False)  # torch's own sum over each tensor: it costs more than HASH, and says less
    try:
        with _without_group_is_fine():
            dcp.save(dict(tensors), storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    finally:
        set_crc32_options(crc32)
    return files.records


def load_tensors(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fills `tensors` in place from the files of `folder`, whatever mesh wrote them; all ranks of `group` together, or
    this process alone for None.

    Raises dcp.CheckpointException, a BaseException, on all ranks: for a tensor that is missing or of another shape.
    """
    with _without_group_is_fine():
        dcp.load(
            dict(tensors),
            storage_reader=_Reader(folder),
            planner=_TensorPlanner(),
            process_group=group,
            no_dist=group is None,
        )


def first_failure(error: dcp.CheckpointException) -> RanksError:
    """What DCP raises on all ranks, as the error of the first rank that failed."""
    rank, (cause, _) = min(error.failures.items())
    return RanksError(f"rank {rank}: {describe_failure(cause)}")


@contextmanager
def _without_group_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def read_shapes(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, dtype) of the tensors in `folder`. Raises InvalidCheckpointError."""
    found = _Reader(folder).read_metadata().state_dict_metadata
    return {
        name: (tuple(entry.size), str(entry.properties.dtype))
        for name, entry in found.items()
        if isinstance(entry, dcp.metadata.TensorStorageMetadata)
    }


class _TensorPlanner(dcp.DefaultLoadPlanner):
    """Loads tensors; anything else in a checkpoint would be a pickle."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> NoReturn:  # noqa: ARG002
        raise InvalidCheckpointError(f"{read_item.dest_index.fqn} is not a tensor")


class _Reader(dcp.FileSystemReader):
    """Reads DCP's own metadata, which is a pickle, through the list of what a real one needs."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        path = Path(self.path) / METADATA_FILE
        try:
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
        except InvalidCheckpointError:
            raise
        except Exception as error:  # whatever a damaged pickle leads to
            raise InvalidCheckpointError(f"{METADATA_FILE} cannot be read: {type(error).__name__}: {error}") from None
        if not isinstance(metadata, Metadata):
            raise InvalidCheckpointError(f"{METADATA_FILE} holds no metadata of a checkpoint")
        for place in metadata.storage_data.values():
            if Path(place.relative_path).name != place.relative_path:
                raise InvalidCheckpointError(f"{METADATA_FILE} names {place.relative_path}, outside of the checkpoint")
        return metadata


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
    *(("torch", name) for name in ("float64", "float32", "bfloat16", "int64")),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise InvalidCheckpointError(f"{METADATA_FILE} names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def check_file(folder: Path, name: str, record: FileRecord, verify: Verify) -> None:
    """Raises InvalidCheckpointError where the file is not what its record says, OSError where it cannot be read."""
    where = f"{name} (written by rank {record.rank})"
    try:
        size = (folder / name).stat().st_size
        if size != record.bytes:
            raise InvalidCheckpointError(f"{where} has {size:,} bytes instead of {record.bytes:,}")
        if verify == "full" and hash_of(folder / name) != record.hash:
            raise InvalidCheckpointError(f"{where} does not have the content that was written: its {HASH} differs")
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
            raise InvalidCheckpointError(f"{where} is missing") from None
        if error.errno == errno.EIO:
            raise InvalidCheckpointError(f"{where} cannot be read: {error.strerror}") from None
        raise


def hash_of(path: Path) -> str:
    """HASH of a file."""
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(block[:size])
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Until the names in `folder` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
