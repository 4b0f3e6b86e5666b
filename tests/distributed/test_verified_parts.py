"""A checkpoint is read by several ranks: each part of one in a store by one of them, also where a rank fails, and the
position in the data by rank 0."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.distributed.resuming import Start, start_runs
from tests.pool import run_ranks
from tests.unit.checkpoint.making import a_manifest
from titanlite.checkpoint import manifest, planning, storage, verified_parts
from titanlite.checkpoint.saver import Saver
from titanlite.checkpoint.state import STREAMS
from titanlite.storage.address import Address
from titanlite.storage.store import Store

pytestmark = pytest.mark.slow

RANKS = 4
PART_BYTES = 2500
MESHES: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "the same": ((4,), [Shard(0)]),
    "2 replicas": ((2, 2), [Replicate(), Shard(0)]),
    "4 replicas": ((4,), [Replicate()]),
    "other rows": ((2, 2), [Shard(1), Shard(0)]),
}


@contextmanager
def small_parts() -> Iterator[None]:
    with ExitStack() as stack:
        for module in (manifest, storage, verified_parts):
            stack.enter_context(patch.object(module, "PART_BYTES", PART_BYTES))
        yield


def on_mesh(values: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """The state of streams is on all ranks, as in a run."""
    shape, placements = MESHES[name]
    mesh = init_device_mesh("cpu", shape)
    return {
        key: value.clone() if key == STREAMS else distribute_tensor(value.clone(), mesh, placements)
        for key, value in values.items()
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def saved(folder: Address, values: dict[str, torch.Tensor]) -> None:
    """Save a checkpoint, and give each rank, whose store is in its own memory, all objects."""
    group = dist.new_group(backend="gloo")
    saver = Saver(folder, group, "disabled", torch.device("cpu"), list)
    saver.save(a_manifest(1, {}), on_mesh(values, "the same"))
    objects: list[Any] = [None] * RANKS
    dist.all_gather_object(objects, {name: Store(folder).read(name) for name in Store(folder).list()}, group)
    for name, content in {name: content for each in objects for name, content in each.items()}.items():
        Store(folder).write(name, content)


def load_on_meshes(address: str, most_listed: int) -> dict[str, Any]:
    """Per mesh: the reads (object, begin) of the tensors' files by this rank, whether all values are right, the number
    of messages that this rank has sent to another one but rank 0, which alone reads the state of streams, and how often
    it has read the metadata."""
    folder = Address.parse(address)
    values = {"a": torch.arange(8000.0).reshape(400, 20), "b": torch.arange(64.0).reshape(8, 8)}
    values[STREAMS] = torch.arange(160).reshape(16, 10)
    reads: list[tuple[str, int]] = []
    listed: list[Any] = []
    sends: list[int] = []
    read_range, isend = Store.read_range, dist.isend
    group = dist.new_group(backend="gloo")
    found: dict[str, Any] = {}

    def noted(store: Store, name: str, start: int, length: int) -> bytes:
        reads.append((name, start))
        return read_range(store, name, start, length)

    def noted_send(tensor: torch.Tensor, **keys: Any) -> Any:
        sends.append(keys["group_dst"])
        return isend(tensor, **keys)

    def noted_listed(*given: Any) -> bytes:
        listed.append(given)
        return manifest.read_listed(*given)

    with (
        small_parts(),
        patch.object(Store, "read_range", noted),
        patch.object(dist, "isend", noted_send),
        patch.object(storage, "read_listed", noted_listed),
    ):
        with patch.object(planning, "MOST_LISTED", most_listed):
            saved(folder, values)
        assert manifest.read_manifest(folder / "step-1").format == (4 if most_listed else 5)
        for name in MESHES:
            reads.clear()
            sends.clear()
            listed.clear()
            loaded = on_mesh({key: torch.zeros_like(value) for key, value in values.items()}, name)
            storage.load_tensors(folder / "step-1", loaded, group, on_all=(STREAMS,))
            expected = on_mesh(values, name)
            is_right = all(torch.equal(local(loaded[key]), local(expected[key])) for key in values)
            found[name] = [list(reads), is_right, len([rank for rank in sends if rank]), len(listed)]
        for rank in (0, 3):  # its store answers with other content, but for the first requests
            good_answers = iter([True] * 3)

            def altered(store: Store, name: str, start: int, length: int, good: Iterator[bool] = good_answers) -> bytes:
                return read_range(store, name, start, length) if next(good, False) else bytes(length)

            lost = patch.object(Store, "read_range", altered) if dist.get_rank() == rank else small_parts()
            loaded = on_mesh(values, "4 replicas")
            with lost, pytest.raises(dcp.CheckpointException) as raised:
                storage.load_tensors(folder / "step-1", loaded, group, on_all=(STREAMS,))
            found[f"rank {rank} fails"] = {str(at): str(cause) for at, (cause, _) in raised.value.failures.items()}
    return found


@pytest.mark.parametrize("most_listed", [0, planning.MOST_LISTED])
def test_each_part_is_read_by_one_rank(most_listed: int) -> None:
    by_rank = run_ranks(load_on_meshes, RANKS, f"memory://{uuid4().hex}/run", most_listed, timeout_s=60)
    for name in MESHES:
        reads = [tuple(read) for rank in by_rank for read in rank[name][0]]
        assert [rank[name][1] for rank in by_rank] == [True] * RANKS, name
        assert len(reads) == len({*reads}) > 4 * verified_parts.PARTS_AHEAD, name
        counts = [len(rank[name][0]) for rank in by_rank]
        assert max(counts) - min(counts) <= 2, (name, counts)
        assert [rank[name][3] for rank in by_rank] == [1, 0, 0, 0], name  # the metadata
        has_sent = any(rank[name][2] for rank in by_rank)
        assert has_sent == (name in ("2 replicas", "other rows")), name  # what all ranks need is broadcast
    for rank in (0, 3):
        for each in by_rank:
            ((at, cause),) = each[f"rank {rank} fails"].items()
            assert at == str(rank)
            assert "has changed since it was written: its xxh3-128 differs" in cause


@contextmanager
def noting_reads(file: Path) -> Iterator[None]:
    """Append the rank and the name of each tensor that is read inside to `file`."""
    resolve = dcp.DefaultLoadPlanner.resolve_tensor

    def noted(planner: dcp.DefaultLoadPlanner, item: Any) -> torch.Tensor:
        with file.open("a") as lines:
            lines.write(f"{dist.get_rank()} {item.dest_index.fqn}\n")
        return resolve(planner, item)

    with patch.object(dcp.DefaultLoadPlanner, "resolve_tensor", noted):
        yield


def test_a_resume_from_a_folder_reads_the_position_in_the_data_once(tmp_path: Path) -> None:
    resume = Start(("training.steps=2",), 2, around=partial(noting_reads, tmp_path / "reads"))
    first, resumed = start_runs(tmp_path, [Start(("training.steps=1",), 2), resume])
    assert (first.error, resumed.error, resumed.step) == ("", "", 1)
    reads = (tmp_path / "reads").read_text().splitlines()
    assert [line for line in reads if STREAMS in line] == [f"0 {STREAMS}"]
    assert {line[0] for line in reads} == {"0", "1"}
