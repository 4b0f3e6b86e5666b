"""Damaged checkpoints are reported and quarantined, the previous one is loaded, and no pickle in them is executed.

Each case changes files that two ranks have saved; the next start also has two ranks.
"""

import io
import json
import os
import pickle
import random
import re
import shutil
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.forked import Parent
from tests.distributed.standin import Run, on_ranks, save_steps, start_in
from titanlite.checkpoint import manifest as manifest_module
from titanlite.checkpoint.manifest import MANIFEST_FILE, METADATA_FILE, FileRecord, read_manifest, write_manifest
from titanlite.checkpoint.storage import _ALLOWED
from titanlite.runtime.cache import hash_of

pytestmark = pytest.mark.slow

STEPS = 3
SHARDS = ("__0_0.distcp", "__1_0.distcp")
WRITTEN_BY = {"__0_0.distcp": 0, "__1_0.distcp": 1, METADATA_FILE: 0}
OTHER_CONTENT = "has changed since it was written"
OTHER_SIZE = "has [0-9,]+ bytes instead of [0-9,]+"


@pytest.fixture(scope="module")
def model(parent: Parent, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of checkpoints that tests copy."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    parent(save_steps, folder, STEPS)
    return folder


def copies(model: Path, folder: Path, count: int, steps: Sequence[int] = range(1, STEPS + 1)) -> list[Path]:
    """Copies of the folder with checkpoints of these steps."""
    made = [folder / f"{number}" for number in range(count)]
    for path in made:
        for step in steps:
            shutil.copytree(model / f"step-{step}", path / f"step-{step}")
    return made


# Corruptions

Corruption = Callable[[Path, random.Random], str]
"""Damages the checkpoint of step 3 beside those of steps 1 and 2; returns a pattern of the reported reason."""


def damage_pattern(name: str, text: str) -> str:
    return f"{re.escape(name)} \\(written by rank {WRITTEN_BY[name]}\\) {text}"


def flip_bit(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def flip(path: Path, chance: random.Random, name: str) -> str:
    flip_bit(path / name, chance.randrange(8 * (path / name).stat().st_size))
    return damage_pattern(name, OTHER_CONTENT)


def zero(path: Path, chance: random.Random, name: str) -> str:
    data = bytearray((path / name).read_bytes())
    length = chance.choice([1, 16, 512])
    position = chance.choice([at for at in range(len(data)) if any(data[at : at + length])])
    data[position : position + length] = bytes(len(data[position : position + length]))
    (path / name).write_bytes(data)
    return damage_pattern(name, OTHER_CONTENT)


def truncate(path: Path, chance: random.Random, name: str) -> str:
    os.truncate(path / name, chance.randrange(1, (path / name).stat().st_size))
    return damage_pattern(name, OTHER_SIZE)


def empty(path: Path, chance: random.Random, name: str) -> str:  # noqa: ARG001
    os.truncate(path / name, 0)
    return damage_pattern(name, OTHER_SIZE)


def lengthen(path: Path, chance: random.Random, name: str) -> str:  # noqa: ARG001
    (path / name).write_bytes((path / name).read_bytes() + b"\0")
    return damage_pattern(name, OTHER_SIZE)


def remove(path: Path, chance: random.Random, name: str) -> str:  # noqa: ARG001
    (path / name).unlink()
    return damage_pattern(name, "is missing")


def become_folder(path: Path, chance: random.Random, name: str) -> str:  # noqa: ARG001
    (path / name).unlink()
    (path / name).mkdir()
    return damage_pattern(name, f"({OTHER_SIZE}|is missing|is not a regular file)")


def older_shard(path: Path, chance: random.Random, name: str) -> str:  # noqa: ARG001
    """Replace a shard by that of step 2, which has the same size."""
    shutil.copy(path.with_name("step-2") / name, path / name)
    return damage_pattern(name, OTHER_CONTENT)


def swap(path: Path, chance: random.Random) -> str:  # noqa: ARG001
    one, other = (path / name for name in SHARDS)
    one.rename(path / "third")
    other.rename(one)
    (path / "third").rename(other)
    return f"({damage_pattern(SHARDS[0], OTHER_SIZE)}|{damage_pattern(SHARDS[1], OTHER_SIZE)})"


def stale_manifest(path: Path, chance: random.Random) -> str:
    step = chance.choice([1, 2])
    shutil.copy(path.with_name(f"step-{step}") / MANIFEST_FILE, path)
    return f"{MANIFEST_FILE} belongs to step {step}"


def flip_in_manifest(path: Path, chance: random.Random) -> str:
    file = path / MANIFEST_FILE
    flip_bit(file, chance.randrange(8 * file.stat().st_size))
    return f"{MANIFEST_FILE} (cannot be read|has changed since|does not list)"


def truncate_manifest(path: Path, chance: random.Random) -> str:
    file = path / MANIFEST_FILE
    os.truncate(file, chance.randrange(file.stat().st_size))
    return f"{MANIFEST_FILE} cannot be read"


def remove_manifest(path: Path, chance: random.Random) -> str:  # noqa: ARG001
    (path / MANIFEST_FILE).unlink()
    return f"{MANIFEST_FILE} is missing"


CORRUPTIONS: tuple[tuple[str, Corruption], ...] = (
    *(
        (f"{damage.__name__} {name}", partial(damage, name=name))
        for damage in (flip, zero, truncate, empty, lengthen, remove, become_folder, older_shard)
        for name in (SHARDS if damage is older_shard else WRITTEN_BY)
    ),
    *((d.__name__, d) for d in (swap, stale_manifest, flip_in_manifest, truncate_manifest, remove_manifest)),
)


@pytest.mark.parametrize("rounds", [2, pytest.param(32, marks=[pytest.mark.soak, pytest.mark.timeout(0)])])
def test_each_corruption_is_reported_and_the_previous_checkpoint_is_loaded(
    parent: Parent, model: Path, tmp_path: Path, rounds: int
) -> None:
    corruptions = CORRUPTIONS * rounds
    assert len(corruptions) > 50
    folders = copies(model, tmp_path, len(corruptions))
    patterns = [
        corrupt(folder / "step-3", random.Random(number))
        for number, (folder, (_, corrupt)) in enumerate(zip(folders, corruptions, strict=True))
    ]
    found = parent(start_in, folders)
    for folder, (kind, _), pattern, ranks in zip(folders, corruptions, patterns, found, strict=True):
        for answer in ranks:
            assert (answer.get("step"), answer.get("branch")) == (2, "a"), (kind, answer)
        lines = [[line for line in answer["lines"] if "corrupted" in line] for answer in ranks]
        ((line,), *others) = lines
        assert others == [[] for _ in others]  # only rank 0 logs it
        reason = r"Checkpoint step-3 is corrupted: " + pattern + r"[^\n]*\. Quarantined as step-3\.invalid-\d{8}T\d{6}Z"
        assert re.fullmatch(reason, line), (kind, line)
        names = sorted(os.listdir(folder))
        assert [name.split(".")[0] for name in names] == ["step-1", "step-2", "step-3"], (kind, names)
        assert line.endswith(names[2])


def contents(folder: Path) -> list[tuple[str, bytes]]:
    """Contents of all files, named without the suffixes of their folders."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted((f"{path.parent.name.split('.')[0]}/{path.name}", path.read_bytes()) for path in files)


def test_no_new_run_starts_if_all_checkpoints_are_damaged(parent: Parent, model: Path, tmp_path: Path) -> None:
    (folder,) = copies(model, tmp_path, 1)
    flip(folder / "step-1", random.Random(0), SHARDS[0])
    remove(folder / "step-2", random.Random(0), METADATA_FILE)
    remove_manifest(folder / "step-3", random.Random(0))
    before = contents(folder)
    for ranks in parent(start_in, [folder, folder]):  # two starts in sequence
        for answer in ranks:
            kind, text = answer["error"]
            assert kind == "UserError"
            for step in (1, 2, 3):
                assert re.search(rf"step-{step}\.invalid-\d{{8}}T\d{{6}}Z", text)
            assert "To start a new run" in text
    assert contents(folder) == before, "files were changed or deleted"
    assert sorted(name.split(".")[0] for name in os.listdir(folder)) == ["step-1", "step-2", "step-3"]


def hashed_files(folder: Path) -> list[str]:
    """Names of the files that this rank hashes at a start."""
    names = []
    original = manifest_module.hash_of

    def recorded(path: Path) -> str:
        names.append(path.name)
        return original(path)

    manifest_module.hash_of = recorded
    Run(folder)
    return names


def test_each_file_is_verified_by_exactly_one_rank(parent: Parent, model: Path, tmp_path: Path) -> None:
    (folder,) = copies(model, tmp_path, 1)
    for world in (1, 2, 3, 4):
        ranks = parent(on_ranks, hashed_files, world, folder)
        assert Counter(name for names in ranks for name in names) == dict.fromkeys(WRITTEN_BY, 1)
        assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


# Pickles with side effects


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self._canary = f"{canary}"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._canary,)


def rewrite_manifest(folder: Path) -> None:
    """Update the hashes in the manifest to the current files, as an attacker with write access would."""
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
    """The payload is in a field that is not used."""
    metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    metadata.planner_data = Payload(canary)
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))


def payload_in_an_allowed_module(folder: Path, canary: Path) -> None:
    """torch.serialization.os.mkdir: pickle protocol 4 resolves dotted names in an allowed module."""
    text = f"{canary}".encode()
    parts = [b"\x80\x04", short(b"torch.serialization"), short(b"os.mkdir"), b"\x93", short(text), b"\x85R."]
    (folder / METADATA_FILE).write_bytes(b"".join(parts))


def short(text: bytes) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text


def payload_as_value(folder: Path, canary: Path) -> None:
    """A value that is not a tensor, which DCP would unpickle."""
    metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    key = "model/norm"
    index = next(index for index in metadata.storage_data if index.fqn == key)
    info = metadata.storage_data[index]
    metadata.state_dict_metadata[key] = torch.distributed.checkpoint.metadata.BytesStorageMetadata()
    put(folder, info.relative_path, {key: pickle.dumps(Payload(canary))}, metadata)


def records_with(shard: str, record: Callable[[bytes, Path], bytes]) -> Callable[[Path, Path], None]:
    """Replace every tensor's record in the shard by the result of `record`."""

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
    """Write records into a shard, and their offsets into the metadata."""
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
    """The same archive with the payload as data.pkl and valid checksums."""
    old, new = io.BytesIO(), io.BytesIO()
    torch.save(torch.load(io.BytesIO(record)), old)
    with zipfile.ZipFile(old) as archive, zipfile.ZipFile(new, "w", zipfile.ZIP_STORED) as other:
        assert any(name.endswith("/data.pkl") for name in archive.namelist())
        for name in archive.namelist():
            other.writestr(name, pickle.dumps(Payload(canary)) if name.endswith("/data.pkl") else archive.read(name))
    return new.getvalue()


def as_old_torch_file(record: bytes, canary: Path) -> bytes:  # noqa: ARG001
    """The file format of torch before zip archives."""
    return pickle.dumps(torch.serialization.MAGIC_NUMBER, 2) + pickle.dumps(1001, 2) + pickle.dumps(Payload(canary), 2)


def bare(record: bytes, canary: Path) -> bytes:  # noqa: ARG001
    return pickle.dumps(Payload(canary))


IN_METADATA = (payload_as_metadata, payload_in_metadata, payload_in_an_allowed_module, payload_as_value)
KINDS = (in_torch_zip, as_old_torch_file, bare)


def name_files_elsewhere(folder: Path) -> None:
    """Refer to unverified files outside of the checkpoint."""
    metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = replace(info, relative_path=f"../step-1/{info.relative_path}")
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))


def test_no_file_outside_of_the_checkpoint_is_read(parent: Parent, model: Path, tmp_path: Path) -> None:
    (folder,) = copies(model, tmp_path, 1, steps=[1])
    name_files_elsewhere(folder / "step-1")
    rewrite_manifest(folder / "step-1")
    ((one, other),) = parent(start_in, [folder])
    assert one["error"] == other["error"]
    assert one["error"][0] == "UserError"
    assert re.search(r"\.metadata names \.\./step-1/__[01]_0\.distcp, outside the checkpoint", one["error"][1])


def test_no_payload_in_metadata_or_a_shard_is_executed(parent: Parent, model: Path, tmp_path: Path) -> None:
    attacks = [*IN_METADATA, *(records_with(shard, kind) for shard in SHARDS for kind in KINDS)]
    canary = tmp_path / "canary"
    folders = copies(model, tmp_path / "attacked", len(attacks), steps=[1])
    for folder, attack in zip(folders, attacks, strict=True):
        attack(folder / "step-1", canary)
        rewrite_manifest(folder / "step-1")
    assert not canary.exists()
    for number, (folder, ranks) in enumerate(zip(folders, parent(start_in, folders), strict=True)):
        for answer in ranks:
            kind, text = answer["error"]
            assert kind == "UserError", answer
            assert f"{folder / 'step-1'} cannot be loaded: rank " in text
            if number < len(IN_METADATA):
                assert f"{METADATA_FILE} names " in text
                assert "which is not allowed" in text
            else:
                assert "UnpicklingError" in text or "weights_only" in text.lower(), text
    assert not canary.exists()


def test_payloads_execute_if_loaded_without_protection(model: Path, tmp_path: Path) -> None:
    """Otherwise the test above would test nothing."""
    for number, kind in enumerate(KINDS):
        canary = tmp_path / f"canary-{number}"
        file = io.BytesIO()
        torch.save(torch.zeros(1), file)
        record = io.BytesIO(kind(file.getvalue(), canary))
        with suppress(Exception):  # the result is not a tensor
            torch.load(record, weights_only=False) if kind is not bare else pickle.load(record)
        assert canary.exists()
    attacks = IN_METADATA[:3]
    folders = copies(model, tmp_path, len(attacks), steps=[1])
    for number, (folder, attack) in enumerate(zip(folders, attacks, strict=True)):
        canary = tmp_path / f"canary-metadata-{number}"
        attack(folder / "step-1", canary)
        pickle.loads((folder / "step-1" / METADATA_FILE).read_bytes())
        assert canary.exists()


def test_pickle_in_place_of_the_manifest_is_a_damaged_manifest(parent: Parent, model: Path, tmp_path: Path) -> None:
    (folder,) = copies(model, tmp_path / "saved", 1, steps=[1, 2])
    (folder / "step-2" / MANIFEST_FILE).write_bytes(pickle.dumps(Payload(tmp_path / "canary")))
    ((one, other),) = parent(start_in, [folder])
    assert not (tmp_path / "canary").exists()
    assert one["step"] == other["step"] == 1
    assert f"Checkpoint step-2 is corrupted: {MANIFEST_FILE} cannot be read" in "\n".join(one["lines"])


def test_nothing_else_in_a_checkpoint_is_a_pickle(model: Path) -> None:
    assert {path.name for path in (model / "step-1").iterdir()} == {MANIFEST_FILE, METADATA_FILE, *SHARDS}
    json.loads((model / "step-1" / MANIFEST_FILE).read_text())


def unpickled_names(folder: Path) -> list[str]:
    """Names that are unpickled while a run starts."""
    seen: set[str] = set()
    sys.addaudithook(lambda event, args: seen.add(f"{args[0]}.{args[1]}") if event == "pickle.find_class" else None)
    run = Run(folder)
    assert run.step == STEPS
    return sorted(seen)


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
"""Names in the .metadata of these checkpoints, whose tensors are float32 and int64."""
RANKS_EXCHANGE = {
    "titanlite.checkpoint.manifest.Branch",
    "titanlite.checkpoint.manifest.Manifest",
    "titanlite.checkpoint.manifest.FileRecord",
    *(f"torch.distributed.checkpoint.planner.{name}" for name in ("LoadPlan", "ReadItem", "LoadItemType")),
}
"""Names in the pickles that titanlite and DCP exchange between ranks while loading; these pickles do not come from
files. A single process sends them to itself."""


def test_load_unpickles_only_names_of_metadata_and_of_rank_exchange(
    parent: Parent, model: Path, tmp_path: Path
) -> None:
    (folder,) = copies(model, tmp_path, 1)
    for world in (1, 2):
        for names in parent(on_ranks, unpickled_names, world, folder):
            assert set(names) == METADATA_NEEDS | RANKS_EXCHANGE
    allowed = {f"{module}.{name}" for module, name in _ALLOWED}
    assert allowed >= METADATA_NEEDS
    assert not RANKS_EXCHANGE & allowed
