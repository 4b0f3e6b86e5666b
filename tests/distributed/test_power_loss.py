"""The order in which a save brings things to the disk: at any moment, what has its name is complete there."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.file_operations import watch
from tests.distributed.forked import Parent, fork_ranks
from tests.distributed.standin import Run
from titanlite.checkpoint.manifest import MANIFEST_FILE

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Operation:
    """time: on a clock that all ranks share. size: of the file that has been synced."""

    time: float
    kind: str
    name: str
    size: int


def operations_of_a_save(root: Path, mode: str) -> list[Any]:
    """What this rank does to the files below `root`, from the start of a run to the end of its second save."""
    noted: list[Any] = []

    def note(kind: str, name: str, descriptor: int) -> None:
        noted.append([time.monotonic(), kind, name, os.fstat(descriptor).st_size if descriptor >= 0 else 0])

    watch(root, note)
    Run(root / "c", async_mode=mode, keep_latest_k=1).train("a", 2)
    return noted


def noted(root: Path, mode: str) -> list[Any]:
    """The operations of both ranks, in the order in which they happened."""
    ends = fork_ranks(operations_of_a_save, 2, root, mode)
    for end in ends:
        assert end.error is None, end
    return sorted(operation for end in ends for operation in end.result)


def violations(operations: list[Operation], folder: str, step: int, sizes: dict[str, int]) -> list[str]:
    """What could be lost of the checkpoint of `step`, at whose publication that of the step before goes.

    folder: of the checkpoints. sizes: of the files that were published, by name.
    """
    writing = f"{folder}/.step-{step}.writing"
    times = {f"{operation.kind} {operation.name}": operation.time for operation in operations}
    published = times[f"rename {writing} -> step-{step}"]
    renamed = {
        new: name.removeprefix(f"{writing}/")
        for name, _, new in (o.name.partition(" -> ") for o in operations if o.kind == "rename")
        if name.startswith(f"{writing}/")
    }
    missing = float("inf")
    synced_files = {}
    wrong = []
    for name, size in sizes.items():
        synced = [
            operation.time
            for operation in operations
            if operation.kind == "fsynced" and operation.name == f"{writing}/{renamed.get(name, name)}"
            if operation.size == size  # later writes would not be on the disk
        ]
        synced_files[name] = min(synced, default=missing)
        if synced_files[name] > published:
            wrong.append(f"{name} may be incomplete: it is published before all of it is synced")
    names_made = max(
        operation.time
        for operation in operations
        if operation.kind in ("create", "rename") and operation.name.startswith(f"{writing}/")
    )
    synced_names = [o.time for o in operations if o.kind == "fsynced" and o.name == writing and o.time > names_made]
    if min(synced_names, default=missing) > published:
        wrong.append("files may be missing: the folder is published before their names are synced")
    if times[f"create {writing}/{MANIFEST_FILE}"] < max(t for n, t in synced_files.items() if n != MANIFEST_FILE):
        wrong.append("the manifest is written before what it lists is synced")
    deleting = times[f"rename {folder}/step-{step - 1}/{MANIFEST_FILE} -> {MANIFEST_FILE}.deleted"]
    if not any(o.kind == "fsynced" and o.name == folder and published < o.time < deleting for o in operations):
        wrong.append("the name may be lost: it is not synced before an older one is deleted")
    return wrong


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_what_is_published_is_on_the_disk(parent: Parent, tmp_path: Path, mode: str) -> None:
    operations = [Operation(*operation) for operation in parent(noted, tmp_path, mode)]
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "c/step-2").iterdir()}
    assert len(sizes) == 4
    assert violations(operations, "c", 2, sizes) == []

    (published,) = (number for number, o in enumerate(operations) if o.name == "c/.step-2.writing -> step-2")
    synced = [
        operation
        for number, operation in enumerate(operations)
        if operation.kind == "fsynced"
        if operation.name.startswith("c/.step-2.writing") or (operation.name == "c" and number > published)
    ]
    assert len(synced) == 6, "each of four files, their folder, and the folder above it"
    for left_out in synced:
        assert violations([o for o in operations if o is not left_out], "c", 2, sizes), left_out


def test_the_folder_of_the_checkpoints_is_itself_on_the_disk(parent: Parent, tmp_path: Path) -> None:
    operations = [Operation(*operation) for operation in parent(noted, tmp_path, "disabled")]
    kinds = [f"{operation.kind} {operation.name}" for operation in operations]
    assert kinds.index("mkdir c") < kinds.index("fsynced .") < kinds.index("create c/.probe.writing")


def test_a_deletion_takes_the_manifest_first(parent: Parent, tmp_path: Path) -> None:
    """A folder that has lost some of its files is then no damaged checkpoint."""
    operations = [Operation(*operation) for operation in parent(noted, tmp_path, "disabled")]
    kinds = [f"{operation.kind} {operation.name}" for operation in operations]
    published = kinds.index("rename c/.step-2.writing -> step-2")
    steps = [
        *("rename c/step-1/MANIFEST.json -> MANIFEST.json.deleted", "fsynced c/step-1"),
        *("rename c/step-1 -> .step-1.deleting", "shutil.rmtree c/.step-1.deleting"),
    ]
    order = [published, kinds.index("fsynced c", published), *(kinds.index(step) for step in steps)]
    assert order == sorted(order)
