"""Pickles that do something when they are loaded, in every file of a checkpoint: nothing of that happens."""

import io
import json
import os
import pickle
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.forked import Parent, fork_ranks
from tests.distributed.standin import Run, saved, start_in
from titanlite.checkpoint.manifest import MANIFEST_FILE, read_manifest, write_manifest
from titanlite.checkpoint.storage import _ALLOWED, METADATA_FILE, FileRecord, hash_of

pytestmark = pytest.mark.slow

SHARDS = ("__0_0.distcp", "__1_0.distcp")


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self._canary = f"{canary}"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._canary,)


def rewrite_manifest(folder: Path) -> None:
    """As somebody would who can write into the folder: with the hashes of the files that are there."""
    manifest = read_manifest(folder)
    files = {
        name: FileRecord(record.rank, (folder / name).stat().st_size, hash_of(folder / name))
        for name, record in manifest.files.items()
    }
    (folder / MANIFEST_FILE).unlink()
    write_manifest(folder, replace(manifest, files=files))


def payload_as_metadata(folder: Path, canary: Path) -> None:
    (folder / METADATA_FILE).write_bytes(pickle.dumps(Payload(canary)))


def payload_in_metadata(folder: Path, canary: Path) -> None:
    """In a part of it that nothing looks at."""
    metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    metadata.planner_data = Payload(canary)
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))


def payload_by_way_of_an_allowed_name(folder: Path, canary: Path) -> None:
    """torch.serialization.os.mkdir, as pickle's protocol 4 spells what is inside an allowed module."""
    text = f"{canary}".encode()
    parts = [b"\x80\x04", short(b"torch.serialization"), short(b"os.mkdir"), b"\x93", short(text), b"\x85R."]
    (folder / METADATA_FILE).write_bytes(b"".join(parts))


def short(text: bytes) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text


def payload_as_value(folder: Path, canary: Path) -> None:
    """A value that is no tensor: DCP would load it as a pickle."""
    metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    key = "model/norm"
    index = next(index for index in metadata.storage_data if index.fqn == key)
    info = metadata.storage_data[index]
    metadata.state_dict_metadata[key] = torch.distributed.checkpoint.metadata.BytesStorageMetadata()
    put(folder, info.relative_path, {key: pickle.dumps(Payload(canary))}, metadata)


def records_with(shard: str, record: Callable[[bytes, Path], bytes]) -> Callable[[Path, Path], None]:
    """Every tensor's record in the shard becomes what `record` makes of it."""

    def damage(folder: Path, canary: Path) -> None:
        metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
        data = (folder / shard).read_bytes()
        new = {
            index.fqn: record(data[info.offset : info.offset + info.length], canary)
            for index, info in metadata.storage_data.items()
            if info.relative_path == shard
        }
        assert new, f"{shard} holds no tensor"
        put(folder, shard, new, metadata)

    return damage


def put(folder: Path, shard: str, new: dict[str, bytes], metadata: Any) -> None:
    """Puts records into a shard, and their places into the metadata."""
    data = (folder / shard).read_bytes()
    parts = b""
    for index, info in metadata.storage_data.items():
        if info.relative_path == shard:
            record = new.get(index.fqn, data[info.offset : info.offset + info.length])
            metadata.storage_data[index] = replace(info, offset=len(parts), length=len(record))
            parts += record
    (folder / shard).write_bytes(parts)
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))


def in_torch_zip(record: bytes, canary: Path) -> bytes:
    """The same archive, but with sums over its parts, whose data.pkl is the payload."""
    old, new = io.BytesIO(), io.BytesIO()
    torch.save(torch.load(io.BytesIO(record)), old)
    with zipfile.ZipFile(old) as archive, zipfile.ZipFile(new, "w", zipfile.ZIP_STORED) as other:
        assert any(name.endswith("/data.pkl") for name in archive.namelist())
        for name in archive.namelist():
            other.writestr(name, pickle.dumps(Payload(canary)) if name.endswith("/data.pkl") else archive.read(name))
    return new.getvalue()


def as_old_torch_file(record: bytes, canary: Path) -> bytes:  # noqa: ARG001
    """As torch wrote before it took to archives."""
    return pickle.dumps(torch.serialization.MAGIC_NUMBER, 2) + pickle.dumps(1001, 2) + pickle.dumps(Payload(canary), 2)


def bare(record: bytes, canary: Path) -> bytes:  # noqa: ARG001
    return pickle.dumps(Payload(canary))


IN_METADATA = (payload_as_metadata, payload_in_metadata, payload_by_way_of_an_allowed_name, payload_as_value)
KINDS = (in_torch_zip, as_old_torch_file, bare)


def name_files_elsewhere(folder: Path) -> None:
    """No pickle, but a look at files that nobody has verified."""
    metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = replace(info, relative_path=f"../step-1/{info.relative_path}")
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))


def elsewhere_start(folder: Path) -> list[list[dict[str, Any]]]:
    saved(folder, 1)
    name_files_elsewhere(folder / "step-1")
    rewrite_manifest(folder / "step-1")
    return start_in([folder])


def test_no_file_outside_of_the_checkpoint_is_read(parent: Parent, tmp_path: Path) -> None:
    ((one, other),) = parent(elsewhere_start, tmp_path)
    assert one["error"] == other["error"]
    assert one["error"][0] == "UserError"
    assert re.search(r"\.metadata names \.\./step-1/__[01]_0\.distcp, outside of the checkpoint", one["error"][1])


def attacked_starts(folder: Path, canary: Path) -> list[list[dict[str, Any]]]:
    attacks = [*IN_METADATA, *(records_with(shard, kind) for shard in SHARDS for kind in KINDS)]
    saved(folder / "model", 1)
    folders = []
    for number, attack in enumerate(attacks):
        target = folder / f"{number}"
        shutil.copytree(folder / "model", target)
        attack(target / "step-1", canary)
        rewrite_manifest(target / "step-1")
        folders.append(target)
    return start_in(folders)


@pytest.mark.slow
def test_no_payload_in_metadata_or_a_shard_is_executed(parent: Parent, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    outcomes = parent(attacked_starts, tmp_path / "attacked", canary)
    assert len(outcomes) == len(IN_METADATA) + len(SHARDS) * len(KINDS)
    assert not canary.exists()
    for number, ranks in enumerate(outcomes):
        for answer in ranks:
            kind, text = answer["error"]
            assert kind == "UserError", answer
            assert f"{tmp_path / 'attacked' / str(number) / 'step-1'} cannot be loaded: rank " in text
            if number < len(IN_METADATA):
                assert f"{METADATA_FILE} names " in text
                assert "which no checkpoint needs" in text
            else:
                assert "UnpicklingError" in text or "weights_only" in text.lower(), text


def test_the_payloads_do_execute_where_they_are_loaded_without_care(parent: Parent, tmp_path: Path) -> None:
    """Or the test above shows nothing."""
    for number, kind in enumerate(KINDS):
        canary = tmp_path / f"canary-{number}"
        file = io.BytesIO()
        torch.save(torch.zeros(1), file)
        record = io.BytesIO(kind(file.getvalue(), canary))
        with suppress(Exception):  # what it makes is no tensor
            torch.load(record, weights_only=False) if kind is not bare else pickle.load(record)
        assert canary.exists()
    parent(saved, tmp_path / "model", 1)
    for number, attack in enumerate(IN_METADATA[:3]):
        canary = tmp_path / f"canary-metadata-{number}"
        folder = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "model" / "step-1", folder)
        attack(folder, canary)
        pickle.loads((folder / METADATA_FILE).read_bytes())
        assert canary.exists()


def pickled_manifest(folder: Path, canary: Path) -> list[list[dict[str, Any]]]:
    saved(folder, 2)
    (folder / "step-2" / MANIFEST_FILE).write_bytes(pickle.dumps(Payload(canary)))
    return start_in([folder])


def test_a_pickle_in_place_of_the_manifest_is_a_damaged_manifest(parent: Parent, tmp_path: Path) -> None:
    ((one, other),) = parent(pickled_manifest, tmp_path / "saved", tmp_path / "canary")
    assert not (tmp_path / "canary").exists()
    assert one["step"] == other["step"] == 1
    assert f"Checkpoint step-2 is damaged: {MANIFEST_FILE} cannot be read" in "\n".join(one["lines"])


def test_nothing_else_in_a_checkpoint_is_a_pickle(parent: Parent, tmp_path: Path) -> None:
    parent(saved, tmp_path, 1)
    assert {path.name for path in (tmp_path / "step-1").iterdir()} == {MANIFEST_FILE, METADATA_FILE, *SHARDS}
    json.loads((tmp_path / "step-1" / MANIFEST_FILE).read_text())


def unpickled_names(folder: Path) -> list[str]:
    """Of all that is unpickled while a run starts and saves."""
    seen: set[str] = set()
    sys.addaudithook(lambda event, args: seen.add(f"{args[0]}.{args[1]}") if event == "pickle.find_class" else None)
    run = Run(folder)
    assert run.step == 2
    return sorted(seen)


def names_of_ranks(folder: Path, world: int) -> list[list[str]]:
    saved(folder, 2)
    return [end.result for end in fork_ranks(unpickled_names, world, folder)]


METADATA_NEEDS = {
    *(f"torch.{name}" for name in ("Size", "float32", "int64", "serialization._get_layout")),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    *(
        f"torch.distributed.checkpoint.metadata.{name}"
        for name in (
            *("Metadata", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
            *("ChunkStorageMetadata", "MetadataIndex"),
        )
    ),
}
"""What the .metadata of these checkpoints holds: the tensors are of float32 and int64."""
RANKS_EXCHANGE = {
    "titanlite.checkpoint.manifest.Branch",
    "titanlite.checkpoint.manifest.Manifest",
    "titanlite.checkpoint.storage.FileRecord",
    *(f"torch.distributed.checkpoint.planner.{name}" for name in ("LoadPlan", "ReadItem", "LoadItemType")),
}
"""What the living processes of one run send one another while they load, ours and DCP's: these pickles come from no
file. One process alone sends them to itself."""


@pytest.mark.parametrize("world", [1, 2])
def test_a_load_unpickles_only_what_metadata_needs_and_what_ranks_exchange(
    parent: Parent, tmp_path: Path, world: int
) -> None:
    for names in parent(names_of_ranks, tmp_path, world):
        assert set(names) == METADATA_NEEDS | RANKS_EXCHANGE
    allowed = {f"{module}.{name}" for module, name in _ALLOWED}
    assert allowed >= METADATA_NEEDS
    assert not RANKS_EXCHANGE & allowed
