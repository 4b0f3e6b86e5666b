"""Save and load tensors with torch's distributed checkpoint (DCP): files are hashed while they are written, contain
only tensors, and are read without executing code."""

import io
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.serialization import get_crc32_options, set_crc32_options

from titanlite.checkpoint.manifest import METADATA_FILE, FileRecord, InvalidCheckpointError
from titanlite.ranks.agreement import RanksError, describe_failure
from titanlite.runtime.files import open_regular


class _HashingFile(io.RawIOBase):
    """Hashes a file while it is written sequentially.

    The constructor takes an open file instead of a path: if it opened the file and that failed, Python's finalizer
    would call close() on an object without `_file`.
    """

    def __init__(self, file: io.FileIO) -> None:
        super().__init__()
        self._file = file
        self._hash = xxhash.xxh3_128()
        self._bytes = 0
        self.failure: OSError | None = None
        """The error of a failed write: torch's archive continues after it and raises a less specific error."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write all of `data`. After a partial write, writing the rest raises the specific error."""
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
    """Writes one file per rank, or per tensor. Uses one thread: with several, DCP loses errors."""

    def __init__(self, folder: Path, files: _HashingFileSystem, *, file_per_tensor: bool) -> None:
        super().__init__(folder, single_file_per_rank=not file_per_tensor, thread_count=1, sync_files=True)
        self.fs = files

    def storage_meta(self) -> None:
        """Return None, so that the metadata do not contain the path of the folder."""


class _LocalPlanner(dcp.DefaultSavePlanner):
    """Plans with the run's tensors, and reads the data from `local`: this rank's shard of each, on any device."""

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
    """Write `tensors` into the empty `folder` and sync each file; returns the records of this rank's files.

    A collective over `group`; None: this process alone. tensors: DTensors, or plain tensors that are equal on all ranks
    that have the name; only their shapes, placements and dtypes are read. local: this rank's shard of each, with the
    data; each is looked up once, when it is written. file_per_tensor: DCP then frees each tensor once it is written,
    not all at the end. Raises dcp.CheckpointException, a BaseException, on all ranks if one fails.
    """
    files = _HashingFileSystem(0 if group is None else dist.get_rank())
    writer, planner = _Writer(folder, files, file_per_tensor=file_per_tensor), _LocalPlanner(local)
    crc32 = get_crc32_options()
    set_crc32_options(False)  # torch's checksum of each tensor is slower and weaker than HASH
    try:
        with _ignore_no_group_warning():
            dcp.save(dict(tensors), storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    finally:
        set_crc32_options(crc32)
    return files.records


def load_tensors(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill `tensors` in place from the files of `folder`, written by any mesh.

    A collective over `group`; None: this process alone. Raises dcp.CheckpointException, a BaseException, on all ranks
    if a tensor is missing or has another shape.
    """
    with _ignore_no_group_warning():
        dcp.load(
            dict(tensors),
            storage_reader=_Reader(folder),
            planner=_TensorPlanner(),
            process_group=group,
            no_dist=group is None,
        )


def first_failure(error: dcp.CheckpointException) -> RanksError:
    """Convert DCP's error on all ranks to that of the first failed rank."""
    rank, (cause, _) = min(error.failures.items())
    return RanksError(f"rank {rank}: {describe_failure(cause)}")


@contextmanager
def _ignore_no_group_warning() -> Iterator[None]:
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
    """Loads tensors only: any other value would be a pickle."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> NoReturn:  # noqa: ARG002
        raise InvalidCheckpointError(f"{read_item.dest_index.fqn} is not a tensor")


class _Reader(dcp.FileSystemReader):
    """Reads DCP's metadata, a pickle, through an allow-list of the names that valid metadata contain."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        path = Path(self.path) / METADATA_FILE
        try:
            with open_regular(path) as file:
                metadata = _MetadataUnpickler(file).load()
        except InvalidCheckpointError:
            raise
        except Exception as error:  # a corrupted pickle can raise any
            raise InvalidCheckpointError(f"{METADATA_FILE} cannot be read: {type(error).__name__}: {error}") from None
        if not isinstance(metadata, Metadata):
            raise InvalidCheckpointError(f"{METADATA_FILE} does not contain the metadata of a checkpoint")
        for stored in metadata.storage_data.values():
            if Path(stored.relative_path).name != stored.relative_path:
                raise InvalidCheckpointError(f"{METADATA_FILE} names {stored.relative_path}, outside the checkpoint")
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
