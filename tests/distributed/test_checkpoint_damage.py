"""Damaged checkpoints are reported and quarantined, the previous one is loaded, and no pickle in them is executed.

Each case changes files that two ranks have saved; the next start also has two ranks.
"""

import io
import json
import os
import pickle
import re
import shutil
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

from tests.distributed.forked import on_ranks
from tests.distributed.standin import Run, save_steps, start_in
from titanlite.checkpoint import manifest as manifest_module
from titanlite.checkpoint.manifest import MANIFEST_FILE, METADATA_FILE, FileRecord, read_manifest, write_manifest
from titanlite.runtime.cache import hash_of

pytestmark = pytest.mark.slow

STEPS = 3
SHARDS = ("__0_0.distcp", "__1_0.distcp")
WRITTEN_BY = {"__0_0.distcp": 0, "__1_0.distcp": 1, METADATA_FILE: 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of checkpoints that tests copy."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    save_steps(folder, STEPS)
    return folder


def copies(model: Path, folder: Path, count: int, steps: Sequence[int] = range(1, STEPS + 1)) -> list[Path]:
    """Copies of the folder with checkpoints of these steps."""
    made = [folder / f"{number}" for number in range(count)]
    for path in made:
        for step in steps:
            shutil.copytree(model / f"step-{step}", path / f"step-{step}")
    return made


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


CHANGED = r"\(written by rank {}\) has changed since it was written"
DAMAGES: tuple[tuple[Callable[[Path], None], str, str], ...] = (
    (flip, SHARDS[0], CHANGED.format(0)),
    (flip, SHARDS[1], CHANGED.format(1)),
    (flip, METADATA_FILE, CHANGED.format(0)),
    (Path.unlink, SHARDS[1], r"\(written by rank 1\) is missing"),
    (Path.unlink, MANIFEST_FILE, "is missing"),
)
"""(damage, damaged file of step 3, reported reason). tests/unit/checkpoint has more kinds, for one rank."""


def test_each_damage_is_reported_once_and_all_ranks_load_the_previous_checkpoint(model: Path, tmp_path: Path) -> None:
    folders = copies(model, tmp_path, len(DAMAGES))
    for folder, (damage, name, _) in zip(folders, DAMAGES, strict=True):
        damage(folder / "step-3" / name)
    for folder, (damage, name, reason), ranks in zip(folders, DAMAGES, start_in(folders), strict=True):
        case = damage.__name__, name
        assert [(answer.get("step"), answer.get("branch")) for answer in ranks] == [(2, "a")] * 2, (case, ranks)
        lines = [[line for line in answer["lines"] if "corrupted" in line] for answer in ranks]
        assert [len(found) for found in lines] == [1, 0], case  # only rank 0 logs it
        quarantined = r"Quarantined as (step-3\.invalid-\d{8}T\d{6}Z)"
        expected = rf"Checkpoint step-3 is corrupted: {re.escape(name)} {reason}[^\n]*\. {quarantined}"
        match = re.fullmatch(expected, lines[0][0])
        assert match is not None, (case, lines)
        assert sorted(os.listdir(folder)) == ["step-1", "step-2", match[1]], case


def contents(folder: Path) -> list[tuple[str, bytes]]:
    """Contents of all files, named without the suffixes of their folders."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted((f"{path.parent.name.split('.')[0]}/{path.name}", path.read_bytes()) for path in files)


def test_no_new_run_starts_if_all_checkpoints_are_damaged(model: Path, tmp_path: Path) -> None:
    (folder,) = copies(model, tmp_path, 1)
    flip(folder / "step-1" / SHARDS[0])
    (folder / "step-2" / METADATA_FILE).unlink()
    (folder / "step-3" / MANIFEST_FILE).unlink()
    before = contents(folder)
    for ranks in start_in([folder, folder]):  # two starts in sequence
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


def test_each_file_is_verified_by_exactly_one_rank(model: Path, tmp_path: Path) -> None:
    (folder,) = copies(model, tmp_path, 1)
    for world in (1, 2, 3, 4):
        ranks = on_ranks(hashed_files, world, folder)
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


def payload_in_metadata(folder: Path, canary: Path) -> None:
    """The payload is in a field that is not used."""
    metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    metadata.planner_data = Payload(canary)
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))


def payload_in_shard(folder: Path, canary: Path, record: Callable[[bytes, Path], bytes]) -> None:
    """Replace every tensor's record in the shard of rank 1 by the result of `record`."""
    metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    data, parts = (folder / SHARDS[1]).read_bytes(), b""
    for index, info in metadata.storage_data.items():
        if info.relative_path == SHARDS[1]:
            new = record(data[info.offset : info.offset + info.length], canary)
            metadata.storage_data[index] = replace(info, offset=len(parts), length=len(new))
            parts += new
    assert parts
    (folder / SHARDS[1]).write_bytes(parts)
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


KINDS = (in_torch_zip, as_old_torch_file, bare)


def name_files_elsewhere(folder: Path) -> None:
    """Refer to unverified files outside of the checkpoint."""
    metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = replace(info, relative_path=f"../step-1/{info.relative_path}")
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))


def test_no_file_outside_of_the_checkpoint_is_read(model: Path, tmp_path: Path) -> None:
    (folder,) = copies(model, tmp_path, 1, steps=[1])
    name_files_elsewhere(folder / "step-1")
    rewrite_manifest(folder / "step-1")
    ((one, other),) = start_in([folder])
    assert one["error"] == other["error"]
    assert one["error"][0] == "UserError"
    assert re.search(r"\.metadata names '\.\./step-1/__[01]_0\.distcp', outside the checkpoint", one["error"][1])


def test_no_payload_in_metadata_or_a_shard_is_executed(model: Path, tmp_path: Path) -> None:
    attacks = [payload_in_metadata, *(partial(payload_in_shard, record=kind) for kind in KINDS)]
    refusals = [rf"{METADATA_FILE} names .*which is not allowed", *["UnpicklingError|weights_only"] * len(KINDS)]
    canary = tmp_path / "canary"
    folders = copies(model, tmp_path / "attacked", len(attacks), steps=[1])
    for folder, attack in zip(folders, attacks, strict=True):
        attack(folder / "step-1", canary)
        rewrite_manifest(folder / "step-1")
    for folder, refusal, ranks in zip(folders, refusals, start_in(folders), strict=True):
        for answer in ranks:
            kind, text = answer["error"]
            assert kind == "UserError", answer
            assert f"{folder / 'step-1'} cannot be loaded: rank " in text
            assert re.search(refusal, text, re.IGNORECASE), text
    assert not canary.exists()


def test_payloads_execute_if_loaded_without_protection(tmp_path: Path) -> None:
    """Otherwise the test above would test nothing."""
    for number, kind in enumerate(KINDS):
        canary = tmp_path / f"canary-{number}"
        file = io.BytesIO()
        torch.save(torch.zeros(1), file)
        record = io.BytesIO(kind(file.getvalue(), canary))
        with suppress(Exception):  # the result is not a tensor
            torch.load(record, weights_only=False) if kind is not bare else pickle.load(record)
        assert canary.exists()


def test_nothing_else_in_a_checkpoint_is_a_pickle(model: Path) -> None:
    assert {path.name for path in (model / "step-1").iterdir()} == {MANIFEST_FILE, METADATA_FILE, *SHARDS}
    json.loads((model / "step-1" / MANIFEST_FILE).read_text())
