"""Saves of checkpoints: order of disk operations, and guarantees while a save runs in the background."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.file_operations import watch
from tests.distributed.forked import on_ranks
from tests.distributed.standin import Run, StandIn, start_in
from titanlite.checkpoint import saver as saver_module
from titanlite.checkpoint.manifest import MANIFEST_FILE, Branch, FileRecord, Manifest
from titanlite.checkpoint.planning import PlannedSaves
from titanlite.checkpoint.saver import Saver
from titanlite.checkpoint.state import STREAMS
from titanlite.ranks.failure import FailureReport
from titanlite.runtime.torch_internals import local_part
from titanlite.train import stoppable

# Power loss: a published checkpoint is always complete on the disk


@dataclass(frozen=True)
class Operation:
    """time: on a clock that all ranks share. size: of the synced file."""

    time: float
    kind: str
    name: str
    size: int


def operations_of_a_save(root: Path, mode: str) -> list[Any]:
    """File operations of this rank below `root`, from the start of a run to the end of its second save."""
    recorded: list[Any] = []

    def note(kind: str, name: str, descriptor: int) -> None:
        recorded.append([time.monotonic(), kind, name, os.fstat(descriptor).st_size if descriptor >= 0 else 0])

    watch(root, note)
    Run(root / "c", async_mode=mode, keep_latest_k=1).train("a", 2)
    return recorded


@pytest.fixture(scope="module", params=["disabled", "async"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Operation]]:
    """(checkpoint folder of a run, file operations of both ranks in order of time)"""
    root = tmp_path_factory.mktemp("power")
    by_rank = on_ranks(operations_of_a_save, 2, root, request.param)
    return root / "c", [Operation(*operation) for operation in sorted(by_rank[0] + by_rank[1])]


def violations(operations: list[Operation], folder: str, step: int, sizes: dict[str, int]) -> list[str]:
    """Ways to lose the checkpoint of `step`, whose publication deletes the previous one, in a power failure.

    folder: checkpoint folder. sizes: sizes of the published files by name.
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
        wrong.append("the manifest is written before the files that it lists are synced")
    deleting = times[f"rename {folder}/step-{step - 1} -> .step-{step - 1}.deleting"]
    if not any(o.kind == "fsynced" and o.name == folder and published < o.time < deleting for o in operations):
        wrong.append("the name may be lost: it is not synced before an older checkpoint is deleted")
    return wrong


@pytest.mark.slow
def test_published_checkpoint_is_on_the_disk(recorded: tuple[Path, list[Operation]]) -> None:
    folder, operations = recorded
    sizes = {path.name: path.stat().st_size for path in (folder / "step-2").iterdir()}
    assert len(sizes) == 4
    assert violations(operations, "c", 2, sizes) == []
    names = [operation.name for operation in operations]
    published, deleting = names.index("c/.step-2.writing -> step-2"), names.index("c/step-1 -> .step-1.deleting")
    synced = [
        operation
        for number, operation in enumerate(operations)
        if operation.kind == "fsynced"
        if operation.name.startswith("c/.step-2.writing") or (operation.name == "c" and published < number < deleting)
    ]
    assert len(synced) == 6, "each of four files, their folder, and the folder above it"
    for left_out in synced:
        assert violations([o for o in operations if o is not left_out], "c", 2, sizes), left_out


@pytest.mark.slow
def test_checkpoint_folder_is_on_the_disk(recorded: tuple[Path, list[Operation]]) -> None:
    kinds = [f"{operation.kind} {operation.name}" for operation in recorded[1]]
    assert kinds.index("mkdir c") < kinds.index("fsynced .") < kinds.index("create c/.probe.incomplete")


@pytest.mark.slow
def test_a_deletion_syncs_the_new_name_before_it_removes_files(recorded: tuple[Path, list[Operation]]) -> None:
    """So a partly deleted folder does not count as a damaged checkpoint."""
    kinds = [f"{operation.kind} {operation.name}" for operation in recorded[1]]
    renamed = kinds.index("rename c/step-1 -> .step-1.deleting")
    synced, removed = kinds.index("fsynced c", renamed), kinds.index("shutil.rmtree c/.step-1.deleting")
    assert renamed < synced < removed


# Background saves: values of their step, reused buffers, one save at a time, no save lost


def gate_before_shards(root: Path) -> threading.Event:
    """Event for which the writing thread waits before each shard."""
    gate = threading.Event()

    def wait(operation: str, name: str, descriptor: int) -> None:  # noqa: ARG001
        if operation == "create" and name.endswith(".distcp"):
            assert gate.wait(60)

    watch(root, wait)
    return gate


def change_while_saving(folder: Path) -> str:
    gate = gate_before_shards(folder)
    run = Run(folder, async_mode="async")
    run.state.update_to(1, "a")
    run.checkpoints.after_step(1, False)
    run.state.update_to(2, "a")
    published = (folder / "step-1").exists()
    gate.set()
    run.checkpoints.close()
    return "published too early" if published else ""


def test_save_has_the_values_of_its_start(tmp_path: Path) -> None:
    assert on_ranks(change_while_saving, 2, tmp_path) == [""] * 2
    ((one, other),) = start_in([tmp_path])
    assert (one["step"], one["branch"]) == (other["step"], other["branch"]) == (1, "a")


def note_saves(note: Callable[[Mapping[str, Tensor]], None]) -> None:
    """Call `note` with the tensors of each save before it writes them, and with {} afterwards."""
    original = saver_module.save_tensors

    def recording(
        folder: Path,
        tensors: Mapping[str, Tensor],
        local: Mapping[str, Tensor],
        group: dist.ProcessGroup,
        *,
        saves: PlannedSaves,
    ) -> dict[str, FileRecord]:
        note(local)
        records = original(folder, tensors, local, group, saves=saves)
        note({})
        return records

    saver_module.save_tensors = recording


def places_of_saves(folder: Path) -> list[list[int]]:
    """Tensor addresses of each of four saves, and those of the training state last."""
    places: list[list[int]] = []
    note_saves(lambda local: places.append([tensor.data_ptr() for tensor in local.values()]) if local else None)
    run = Run(folder, async_mode="async")
    run.train("a", 4)
    return [*places, [local_part(tensor).data_ptr() for tensor in run.state.model_and_optimizer().values()]]


def test_all_saves_use_the_same_buffers(tmp_path: Path) -> None:
    for *saves, training in on_ranks(places_of_saves, 2, tmp_path):
        assert len(saves) == 4
        assert saves[1:] == saves[:-1]
        assert not set(saves[0]) & set(training)


def crowded_saves(folder: Path) -> int:
    """Maximum number of concurrent saves, for six saves started in quick succession."""
    running, most = 0, 0

    def note(local: Mapping[str, Tensor]) -> None:
        nonlocal running, most
        running += 1 if local else -1
        most = max(most, running)
        time.sleep(0.02)

    note_saves(note)
    group = dist.group.WORLD
    assert group is not None
    saver = Saver(folder, group, "async", torch.device("cpu"), delete_older=list)
    state = StandIn()
    for step in range(1, 7):
        state.update_to(step, "a")
        tensors = state.model_and_optimizer() | {STREAMS: state.streams(group)}
        saver.begin(Manifest(step, "full", (Branch("a", 0),), asdict(state.state()), {}, {}, {}, "", {}), tensors)
    assert saver.take_failure() is None
    return most


def test_at_most_one_save_runs_at_a_time(tmp_path: Path) -> None:
    assert on_ranks(crowded_saves, 2, tmp_path) == [1, 1]
    ((one, other),) = start_in([tmp_path])
    assert (one["step"], one["branch"]) == (other["step"], other["branch"]) == (6, "a")
    assert {path.name for path in tmp_path.iterdir()} == {f"step-{step}" for step in range(1, 7)}


def ways_out(folder: Path) -> list[list[str]]:
    """Names in the folder after training exits during a save: at its end, by an exception."""
    gate = gate_before_shards(folder)
    found = []
    for number, error in enumerate((None, KeyboardInterrupt())):
        gate.clear()
        own = folder / f"{number}"
        run = Run(own, async_mode="async")
        job = SimpleNamespace(checkpoints=run.checkpoints, stop=SimpleNamespace(activate=lambda *_: None))
        with suppress(KeyboardInterrupt), stoppable(job, FailureReport()):  # type: ignore[arg-type]
            run.state.update_to(1, "a")
            run.checkpoints.after_step(1, False)
            threading.Timer(0.2, gate.set).start()
            if error is not None:
                raise error
        found.append(sorted(path.name for path in own.iterdir()))
        dist.barrier()
    return found


def test_running_save_is_finished_at_exit(tmp_path: Path) -> None:
    for found in on_ranks(ways_out, 2, tmp_path):
        assert found == [["step-1"], ["step-1"]]
