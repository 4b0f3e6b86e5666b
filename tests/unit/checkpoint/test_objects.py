"""Checkpoints in a store: layout, kills between any two requests, verified reading by parts."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.unit.checkpoint.making import Killed, Killer, a_manifest
from titanlite.checkpoint import manifest as manifest_module
from titanlite.checkpoint import storage, verified_parts
from titanlite.checkpoint.config import CheckpointConfig
from titanlite.checkpoint.folder import (
    begin,
    checkpoint_names,
    clear_leftovers,
    complete_manifest,
    discard,
    published_steps,
    quarantine,
    retain,
    step_folder,
    supersede_after,
)
from titanlite.checkpoint.manifest import (
    MANIFEST_FILE,
    METADATA_FILE,
    Branch,
    InvalidCheckpointError,
    check_files,
    files_of,
    read_listed,
    read_manifest,
    write_recorded,
)
from titanlite.checkpoint.preflight import check_start
from titanlite.checkpoint.saver import Saver
from titanlite.checkpoint.start import DamagedError, load
from titanlite.checkpoint.storage import load_tensors, read_shapes
from titanlite.ranks.agreement import RanksError
from titanlite.ranks.job_lock import JOB_LOCK_FILE, this_process
from titanlite.runtime.errors import UserError
from titanlite.storage.address import Address
from titanlite.storage.store import Store

TENSORS = {"a": torch.arange(3000.0), "b": torch.arange(7), "c": torch.full((40, 50), 2.5)}


@pytest.fixture
def folder() -> Address:
    return Address.parse(f"memory://{uuid4().hex}/run")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (manifest_module, storage, verified_parts):
        monkeypatch.setattr(module, "PART_BYTES", 1000)


Save = Callable[..., None]


@pytest.fixture
def save(folder: Address, group: dist.ProcessGroup) -> Save:
    """Saves a checkpoint, with two small files; fields of its manifest may be given."""

    def save(step: int, tensors: dict[str, Tensor] | None = None, keep: int = 0, **changes: Any) -> None:
        small = {f"{name}.json": f"{name} of {step}".encode() for name in ("one", "two")}
        delete_older = partial(retain, folder, keep, 0, ())
        saver = Saver(folder, group, "disabled", torch.device("cpu"), delete_older, small)
        saver.save(a_manifest(step, {}, **changes), tensors or {"w": torch.full((3,), step)})

    return save


def test_a_checkpoint_in_a_store(folder: Address, save: Save) -> None:
    save(5, TENSORS)
    save(10, TENSORS)
    assert published_steps(folder) == [5, 10]
    manifest = complete_manifest(folder, 5)
    names = [f"step-5/{manifest.attempt}/{name}" for name in manifest.files]
    assert sorted(Store(folder).list()) == sorted([*names, "step-5/MANIFEST.json", *Store(folder).list("step-10")])
    assert manifest.format == 4
    assert read_listed(folder / "step-5", manifest, "one.json") == b"one of 5"
    assert read_shapes(folder / "step-5")["c"] == ((40, 50), "torch.float32")
    with pytest.raises(RanksError, match=r"cannot save step 5: .*exists already"):
        save(5)
    own = CheckpointConfig(enable=True, folder=str(folder), initial_load_path=str(folder / "step-5"))
    (problem,) = check_start(own, "dump")  # another dump folder alone has the same checkpoints
    assert problem.remedy.startswith("add --job.dump_folder ANOTHER --checkpoint.folder ANOTHER for a new run")
    assert complete_manifest(folder, 5) == manifest
    clear_leftovers(folder)
    assert complete_manifest(folder, 5) == manifest
    assert check_start(CheckpointConfig(enable=True, folder=str(folder)), "") == []
    (problem,) = check_start(CheckpointConfig(enable=True, folder=f"{folder}/step-5"), "")
    assert (problem.key, problem.remedy) == ("checkpoint.folder", f"write {folder}")


def test_retention_asks_nothing_about_what_it_keeps_forever(
    folder: Address, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[str] = []
    call = Store._call

    def noted(store: Store, verb: str, name: str, request: Callable[[], Any]) -> Any:
        requests.append(f"{verb} {name}")
        return call(store, verb, name, request)

    monkeypatch.setattr(Store, "_call", noted)
    counts = []
    for first, last in ((10, 40), (50, 160)):
        for step in range(first, last + 1, 10):
            save(step)
        requests.clear()
        assert retain(folder, keep_latest_k=2, keep_every=10, keep=()) == []
        counts.append(len(requests))
    assert counts[0] == counts[1] <= 8
    save(165)
    save(170)
    save(180)
    assert retain(folder, keep_latest_k=2, keep_every=10, keep=()) == [165]
    assert published_steps(folder) == [*range(10, 181, 10)]


def test_a_local_copy_of_a_checkpoint_is_read(folder: Address, save: Save, tmp_path: Path) -> None:
    save(5, TENSORS)
    for name in Store(folder).list():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(Store(folder).read(name))
    (tmp_path / "step-5").rename(tmp_path / "mine")
    assert published_steps(tmp_path) == []
    check_files(tmp_path / "mine", read_manifest(tmp_path / "mine"))
    loaded = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    load_tensors(tmp_path / "mine", loaded, None)
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)
    shutil.rmtree(next((tmp_path / "mine").glob("attempt-*")))
    with pytest.raises(InvalidCheckpointError, match="is missing"):
        check_files(tmp_path / "mine", read_manifest(tmp_path / "mine"))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("names", [["a", "b", "c"], ["b"], ["c"]])
def test_parts_are_read_once_and_verified(
    folder: Address, save: Save, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(5, TENSORS)
    manifest = read_manifest(folder / "step-5")
    file = next(name for name in manifest.files if name.endswith(".distcp"))
    record, store = manifest.files[file], Store(folder / "step-5" / manifest.attempt)
    assert len(record.parts) == -(-record.bytes // 1000) > 20
    reads: list[tuple[int, int]] = []
    read_range = Store.read_range

    def noted(self: Store, name: str, start: int, length: int) -> bytes:
        reads.append((start, length))
        return read_range(self, name, start, length)

    monkeypatch.setattr(Store, "read_range", noted)
    loaded = {name: torch.zeros_like(TENSORS[name]) for name in names}
    load_tensors(folder / "step-5", loaded, None)
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in names)
    assert len(reads) == len({*reads})
    needed = sum(TENSORS[name].nbytes for name in names)
    assert needed <= sum(length for _, length in reads) <= needed + 1000 * len(names) + 2500 * len(names)

    content = store.read(file)
    middle = reads[len(reads) // 2][0]
    store.write(file, content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    with pytest.raises(DamagedError) as raised:
        load(folder / "step-5", loaded, None)
    damage = f"{file} (written by rank 0) has changed since it was written: its xxh3-128 differs"
    assert str(raised.value) == f"{folder}/step-5 cannot be loaded: {damage}; choose another step"
    check_files(folder / "step-5", manifest)  # sizes only
    for change, text in (
        (lambda: store.write(file, content[:-1]), "bytes instead of"),
        (lambda: store.delete([file]), "is missing"),
    ):
        change()
        with pytest.raises(InvalidCheckpointError, match=text):
            check_files(folder / "step-5", manifest)


def test_renamed_checkpoints_keep_their_files(folder: Address, save: Save) -> None:
    for created in ("1", "2", "3"):
        save(5, created=created)
        if created < "3":
            assert quarantine(folder, 5, "invalid-now") == (
                "step-5.invalid-now" if created == "1" else "step-5.invalid-now-2"
            )
    save(10)
    assert supersede_after(folder, 3) == [5, 10]
    assert published_steps(folder) == []
    names = ["step-10.superseded-a1", "step-5.invalid-now", "step-5.invalid-now-2", "step-5.superseded-a1"]
    assert checkpoint_names(folder) == names
    save(5)
    assert clear_leftovers(folder) == []
    for name in [*names, "step-5"]:
        manifest = read_manifest(folder / name)
        check_files(folder / name, manifest)
        assert files_of(folder / name, manifest).parent.name == name.partition(".")[0]
        load_tensors(folder / name, {"w": (loaded := torch.zeros(3, dtype=torch.int64))}, None)
        assert loaded.tolist() == [manifest.step] * 3


def test_leftovers_are_cleared_but_nothing_of_others(folder: Address, save: Save) -> None:
    save(5)
    store = Store(folder)
    kept = {
        "job.lock/1.json",
        "step-5/notes.txt",
        "step-5/attempt-of-mine/x",
        "other/step-5/attempt-0123456789abcdef/x",
    }
    for name in kept:
        store.write(name, b"mine")
    store.write("step-5/attempt-0123456789abcdef/x", b"left")
    store.write("step-7/attempt-0123456789abcdef/x", b"left")
    before = store.list()
    assert clear_leftovers(folder) == ["step-5/attempt-0123456789abcdef", "step-7/attempt-0123456789abcdef"]
    assert before.keys() - store.list().keys() == {f"step-{n}/attempt-0123456789abcdef/x" for n in (5, 7)}
    store.write("step-5.invalid-now/MANIFEST.json", b"damaged: it may have named any attempt")
    store.write("step-5/attempt-0123456789abcdef/x", b"maybe its file")
    assert clear_leftovers(folder) == []


class StoreKiller(Killer):
    """Counts requests that change something."""

    ends = (Killed, RanksError)  # the save names the error of each rank

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        call = Store._call

        def counted(store: Store, verb: str, name: str, request: Callable[[], Any]) -> Any:
            if verb not in {"list", "read"}:
                self.count(verb)
            return call(store, verb, name, request)

        monkeypatch.setattr(Store, "_call", counted)


def test_a_kill_at_any_request_loses_nothing(folder: Address, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that saves, deletes the oldest checkpoint, and leaves a branch. Each published checkpoint is complete."""
    killer, at = StoreKiller(monkeypatch), 0
    save(5)
    killed = [True]

    def check(least: int) -> None:
        steps = published_steps(folder)
        for step in steps:
            complete_manifest(folder, step)
            load_tensors(step_folder(folder, step), {"w": (loaded := torch.zeros(3, dtype=torch.int64))}, None)
            assert loaded.tolist() == [step] * 3
        assert steps[-1] >= least

    while killed:
        for step in range(10 + 15 * at, 25 + 15 * at, 5):
            latest = published_steps(folder)[-1]
            with killer.at(at, []) as killed:
                save(step, keep=1)
            check(latest)
            clear_leftovers(folder)
            check(latest)
            latest = published_steps(folder)[-1]
            retain(folder, keep_latest_k=1, keep_every=0, keep=())
            assert {name.partition("/")[0] for name in Store(folder).list()} == {f"step-{latest}"}
        at += 1
    assert at > 8
    for at in range(5):
        save(1000, lineage=(Branch(f"b{at}", 0),))
        save(2000, lineage=(Branch(f"b{at}", 0),))
        with killer.at(at, []) as killed:
            supersede_after(folder, 999)
        for step in published_steps(folder):
            complete_manifest(folder, step)
        supersede_after(folder, 999)
        clear_leftovers(folder)
    assert not killed
    for name in checkpoint_names(folder):
        check_files(folder / name, read_manifest(folder / name))


def test_a_failed_attempt_is_discarded(folder: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    writing = begin(folder, 5)
    assert isinstance(writing, Address)
    write_recorded(writing / "x", b"x")
    discard(writing)
    assert Store(folder).list() == {}
    write_recorded(writing / "x", b"x")

    def refuse(*_: Any) -> None:
        raise UserError("no answer")

    monkeypatch.setattr(Store, "list", refuse)
    discard(writing)  # the error of the save counts


def test_a_job_that_was_taken_over_publishes_nothing(folder: Address, save: Save) -> None:
    save(5)
    Store(folder).create(f"{JOB_LOCK_FILE}/1.json", replace(this_process({}), host="other").encode())
    with pytest.raises(RanksError, match=f"checkpoint.folder: {folder} was taken over by process .* on host other"):
        save(6)
    assert published_steps(folder) == [5]


def test_damaged_manifests(folder: Address, save: Save) -> None:
    save(5)
    store = Store(folder / "step-5")
    content = store.read(MANIFEST_FILE)
    with pytest.raises(InvalidCheckpointError, match="is missing"):
        read_manifest(folder / "step-6")
    for damaged in (b"", content[:-9], content.replace(b"attempt-", b"attempt_")):
        store.write(MANIFEST_FILE, damaged)
        with pytest.raises(InvalidCheckpointError, match=r"truncated|has changed|is not JSON"):
            complete_manifest(folder, 5)
    store.write(MANIFEST_FILE, content)
    manifest = read_manifest(folder / "step-5")
    Store(folder / "step-5" / manifest.attempt).write(METADATA_FILE, b"other")
    with pytest.raises(InvalidCheckpointError, match=r"\.metadata has changed"):
        read_shapes(folder / "step-5")
