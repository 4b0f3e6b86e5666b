"""Hashes of written files, errors for corrupted files, and metadata read without executing code."""

import io
import os
import pickle
import pickletools
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from titanlite.checkpoint.manifest import METADATA_FILE, FileRecord, InvalidCheckpointError, check_file
from titanlite.checkpoint.storage import (
    _ALLOWED,
    _HashingFile,
    _HashingFileSystem,
    first_failure,
    load_tensors,
    read_shapes,
    save_tensors,
)
from titanlite.runtime.cache import hash_of
from titanlite.runtime.torch_internals import local_part


def record_of(path: Path, rank: int = 0) -> FileRecord:
    """Compute the record of a file with xxhash."""
    data = path.read_bytes()
    return FileRecord(rank, len(data), xxhash.xxh3_128(data).hexdigest())


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [b""],
        [b"a"],
        [b"abc", b"", b"d" * 100_000],
        [bytearray(b"xy"), memoryview(b"uvw")[1:]],
        [memoryview(torch.arange(1000, dtype=torch.int32).numpy())],
        [b"a", b"b" * 300_000, b"c", b"d" * 200_000, b"e" * 200_000, b"f"],  # some are gathered
    ],
)
def test_the_record_matches_the_file_on_disk(tmp_path: Path, pieces: list[Any]) -> None:
    path = tmp_path / "file"
    with _HashingFile(io.FileIO(path, "x")) as file:
        for piece in pieces:
            before = file.tell()
            assert file.write(piece) == memoryview(piece).nbytes
            assert file.tell() == before + memoryview(piece).nbytes
        os.fsync(file.fileno())
        assert file.record(5) == record_of(path, 5)
    assert path.read_bytes() == b"".join(bytes(piece) for piece in pieces)


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError), _HashingFileSystem(0).create_stream(tmp_path / "file", "wb"):
        pass
    assert (tmp_path / "file").read_text() == "mine"


def test_partial_writes_are_completed_and_hashed_once(tmp_path: Path) -> None:
    class Reluctant(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data)[:7])

    path = tmp_path / "file"
    with _HashingFile(Reluctant(path, "x")) as file:
        assert file.write(b"0123456789" * 10) == 100
        assert file.record(0) == record_of(path)
        assert path.stat().st_size == 100


def test_a_full_disk_error_names_the_file(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with _HashingFile(io.FileIO(tmp_path / "file", "x")) as file:
            file.write(bytes(1001))
            with pytest.raises(OSError, match="File too large") as caught:
                file.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert caught.value.filename == str(tmp_path / "file")


def test_only_completely_written_files_have_a_record(tmp_path: Path) -> None:
    files = _HashingFileSystem(2)
    with files.create_stream(tmp_path / "a.tmp", "wb") as stream:
        stream.write(b"abc")
    files.rename(tmp_path / "a.tmp", tmp_path / "a")
    with pytest.raises(TypeError), files.create_stream(tmp_path / "b", "wb") as stream:
        stream.write(None)
    assert files.records == {"a": record_of(tmp_path / "a", 2)}
    with files.create_stream(tmp_path / "a", "rb") as stream:
        assert stream.read() == b"abc"
    assert list(files.records) == ["a"]


@pytest.mark.parametrize("size", [0, 1, 2**22 - 1, 2**22, 2**22 + 1, 3 * 2**22])
def test_hash_of_hashes_the_bytes_of_a_file(tmp_path: Path, size: int) -> None:
    data = torch.arange(size, dtype=torch.int32).to(torch.uint8).numpy().tobytes()
    (tmp_path / "file").write_bytes(data)
    assert hash_of(tmp_path / "file") == xxhash.xxh3_128_hexdigest(data)


def test_a_file_in_place_of_the_folder_is_invalid(tmp_path: Path) -> None:
    (tmp_path / "step-5").write_text("")
    with pytest.raises(InvalidCheckpointError, match="is missing"):
        check_file(tmp_path / "step-5", "a", FileRecord(0, 1, ""))


@pytest.mark.parametrize(("number", "corrupted"), [(5, True), (13, False), (24, False)])
def test_only_an_io_error_counts_as_corruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, corrupted: bool
) -> None:
    """EIO counts; a missing permission and too many open files can be fixed without losing data."""
    (tmp_path / "a").write_bytes(b"a")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    record = record_of(tmp_path / "a")
    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(InvalidCheckpointError if corrupted else OSError, match=os.strerror(number)):
        check_file(tmp_path, "a", record)


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64]


def tensors_of_a_run() -> dict[str, torch.Tensor]:
    """Return each dtype as a sharded tensor, a plain tensor and a scalar."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    made = {}
    for dtype in DTYPES:
        values = torch.arange(12).reshape(3, 4).to(dtype)
        made[f"sharded/{dtype}"] = distribute_tensor(values, mesh, [Shard(0)])
        made[f"plain/{dtype}"] = values + 1
        made[f"scalar/{dtype}"] = values[2, 3].clone()
    return made


@pytest.fixture
def saved(tmp_path: Path, group: dist.ProcessGroup) -> tuple[Path, dict[str, FileRecord]]:
    folder = tmp_path / "step-5"
    folder.mkdir()
    tensors = tensors_of_a_run()
    local = {name: local_part(tensor) for name, tensor in tensors.items()}
    return folder, save_tensors(folder, tensors, local, group)


def test_saved_tensors_round_trip_and_each_file_has_a_record(
    saved: tuple[Path, dict[str, FileRecord]], group: dist.ProcessGroup
) -> None:
    folder, records = saved
    assert records == {path.name: record_of(path) for path in folder.iterdir()}
    assert len(records) == 2
    expected = tensors_of_a_run()
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    load_tensors(folder, loaded, group)
    for name, tensor in expected.items():
        assert torch.equal(local_part(loaded[name]), local_part(tensor)), name
    shapes = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in expected.items()}
    assert read_shapes(folder) == shapes


def test_the_data_of_local_are_saved(tmp_path: Path, group: dist.ProcessGroup) -> None:
    tensors = {"a": torch.zeros(3)}
    save_tensors(tmp_path, tensors, {"a": torch.ones(3)}, group)
    load_tensors(tmp_path, tensors, group)
    assert torch.equal(tensors["a"], torch.ones(3))


def test_a_missing_or_misshapen_tensor_is_named(
    saved: tuple[Path, dict[str, FileRecord]], group: dist.ProcessGroup
) -> None:
    for name, shape in (("model/none", (3, 4)), ("plain/torch.float32", (4, 4))):
        with pytest.raises(dcp.CheckpointException) as caught:
            load_tensors(saved[0], {name: torch.zeros(shape)}, group)
        assert name in str(first_failure(caught.value))


class Canary:
    """Records that it was unpickled by a plain unpickler."""

    calls: list[str] = []  # noqa: RUF012

    def __reduce__(self) -> tuple[Any, ...]:
        return Canary.calls.append, ("executed",)


def test_non_tensor_values_are_not_read(tmp_path: Path, group: dist.ProcessGroup) -> None:
    dcp.save({"a": Canary(), "b": torch.ones(2)}, checkpoint_id=tmp_path, process_group=group)
    Canary.calls.clear()
    with pytest.raises((dcp.CheckpointException, InvalidCheckpointError)) as caught:
        load_tensors(tmp_path, {"a": torch.zeros(2), "b": torch.zeros(2)}, group)
    if torch.__version__ >= "2.13":  # older versions hide the reason
        assert "names" in str(caught.value) or "not a tensor" in str(caught.value)
    assert Canary.calls == []


def names_in(data: bytes) -> set[tuple[str, str]]:
    """Return the names that a pickle imports."""
    found = set()

    class Noting(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found.add((module, name))
            return super().find_class(module, name)

    Noting(io.BytesIO(data)).load()
    return found


def test_the_allow_list_is_minimal(saved: tuple[Path, dict[str, FileRecord]]) -> None:
    assert names_in((saved[0] / METADATA_FILE).read_bytes()) - {("builtins", "getattr")} == _ALLOWED


@pytest.mark.parametrize("kind", [_MEM_FORMAT_ENCODING, Metadata])
def test_members_of_an_enumeration_as_python_3_11_2_pickles_them(tmp_path: Path, kind: type) -> None:
    class Member:
        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, (kind, "TORCH_CONTIGUOUS_FORMAT")

    (tmp_path / METADATA_FILE).write_bytes(pickle.dumps(Member()))
    is_member = kind is _MEM_FORMAT_ENCODING
    reason = "does not contain the metadata" if is_member else "names builtins.getattr, which is not allowed"
    with pytest.raises(InvalidCheckpointError, match=reason):
        read_shapes(tmp_path)


FORBIDDEN = [
    *(("os", "system"), ("posix", "system"), ("os", "open"), ("subprocess", "Popen"), ("shutil", "rmtree")),
    *(("builtins", "eval"), ("builtins", "exec"), ("builtins", "getattr"), ("builtins", "__import__")),
    *(("builtins", "open"), ("builtins", "set"), ("builtins", "dict"), ("io", "open"), ("pathlib", "PosixPath")),
    *(("torch", "load"), ("torch", "save"), ("torch", "float16x"), ("torch", "tensor"), ("torch", "Tensor")),
    *(("torch._utils", "_rebuild_tensor_v2"), ("torch.storage", "_load_from_bytes"), ("torch.hub", "load")),
    *(("torch.serialization", "load"), ("torch.serialization", "_get_layout.__globals__"), ("_codecs", "encode")),
    *(("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"), ("copyreg", "_reconstructor")),
    *(("torch.distributed.checkpoint.metadata", "torch"), ("torch.distributed.checkpoint.filesystem", "os")),
    *(("torch.distributed.checkpoint.filesystem", "os.system"), ("torch", "Size.__subclasses__"), ("pickle", "loads")),
    *(("functools", "partial"), ("operator", "attrgetter"), ("collections", "OrderedDict"), ("runpy", "run_path")),
]


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(("module", "name"), FORBIDDEN)
def test_names_not_on_the_allow_list_are_refused(tmp_path: Path, module: str, name: str, protocol: int) -> None:
    """With both pickle opcodes for a global name; the call after it is never executed."""
    if protocol == 2:
        named = f"c{module}\n{name}\n".encode()
    else:
        named = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93"
    canary = tmp_path / "canary"
    call = pickletools.optimize(pickle.dumps((f"touch {canary}",), 2))[2:-1] + b"R."
    (tmp_path / METADATA_FILE).write_bytes(bytes([0x80, protocol]) + named + call)
    with pytest.raises(InvalidCheckpointError, match="which is not allowed") as caught:
        read_shapes(tmp_path)
    named_by = f"names {module}.{name}," if protocol == 4 else "the opcode b'c',"
    assert named_by in str(caught.value)
    assert not canary.exists()


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"x", b"\x80\x04", pickle.dumps({"a": 1}), pickle.dumps(None), b"\x80\x04" + b"(" * 100_000 + b"."),
        *(pickle.dumps([[[1]]])[:-1], b"P1\n.", b"\x80\x04\x82\x01."),
    ],
    ids=lambda data: repr(data[:12]),
)
def test_invalid_metadata_is_reported(tmp_path: Path, data: bytes) -> None:
    (tmp_path / METADATA_FILE).write_bytes(data)
    with pytest.raises(InvalidCheckpointError, match=r"^\.metadata (cannot be read: |does not contain the metadata)"):
        read_shapes(tmp_path)


@pytest.mark.parametrize(
    ("owner", "attribute", "value"),
    [
        (lambda found: found, "state_dict_metadata", {"a": 3}),
        (lambda found: found, "storage_data", {"a": 3}),
        (lambda found: found, "state_dict_metadata", None),
        (lambda found: found.state_dict_metadata["a"], "size", torch.Size([2**62, -1])),
        (lambda found: found.state_dict_metadata["a"], "size", "x"),
        (lambda found: found.state_dict_metadata["a"].properties, "dtype", 3),
        (lambda found: found.state_dict_metadata["a"].chunks[0], "offsets", [None]),
        (lambda found: next(iter(found.storage_data.values())), "relative_path", 7),
        (lambda found: next(iter(found.storage_data.values())), "offset", -1),
        (lambda found: next(iter(found.storage_data.values())), "length", 0.5),
    ],
)
def test_a_value_of_another_type_is_reported(
    tmp_path: Path, group: dist.ProcessGroup, owner: Callable[[Metadata], Any], attribute: str, value: Any
) -> None:
    save_tensors(tmp_path, {"a": torch.ones(2)}, {"a": torch.ones(2)}, group)
    path = tmp_path / METADATA_FILE
    metadata = pickle.loads(path.read_bytes())
    object.__setattr__(owner(metadata), attribute, value)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(InvalidCheckpointError, match=r"^\.metadata (cannot be read: |does not contain the metadata)"):
        read_shapes(tmp_path)


def test_a_small_pickle_takes_little_memory_and_time(tmp_path: Path, group: dist.ProcessGroup) -> None:
    """The index of LONG_BINPUT is the size of an array; tensors may share a list of chunks, and a size."""
    (tmp_path / METADATA_FILE).write_bytes(b"\x80\x04Nr" + (2**32 - 2).to_bytes(4, "little") + b".")
    with pytest.raises(InvalidCheckpointError, match=r"has the opcode b'r', which is not allowed"):
        read_shapes(tmp_path)
    save_tensors(tmp_path / "saved", {"a": torch.ones(2)}, {"a": torch.ones(2)}, group)
    for attribute, length in (("chunks", 100_000), ("size", 200_000)):
        metadata = pickle.loads((tmp_path / "saved" / METADATA_FILE).read_bytes())
        entry = metadata.state_dict_metadata["a"]
        object.__setattr__(
            entry,
            attribute,
            (torch.Size if attribute == "size" else list)([1 if attribute == "size" else entry.chunks[0]] * length),
        )
        metadata.state_dict_metadata |= {str(number): entry for number in range(100_000)}
        (tmp_path / METADATA_FILE).write_bytes(pickle.dumps(metadata))
        with pytest.raises(InvalidCheckpointError, match="does not contain the metadata"):
            read_shapes(tmp_path)


def test_missing_metadata_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpointError, match=r"\.metadata cannot be read: FileNotFoundError"):
        read_shapes(tmp_path)


def test_truncated_metadata_is_reported(saved: tuple[Path, dict[str, FileRecord]]) -> None:
    path = saved[0] / METADATA_FILE
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(InvalidCheckpointError, match=r"^\.metadata cannot be read"):
            read_shapes(saved[0])
