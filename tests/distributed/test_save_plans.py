"""Saves of one run share a plan: their files are those of torch's own saves, and little is sent."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.serialization import set_crc32_options

from tests.pool import run_ranks
from titanlite.checkpoint.planning import PlannedSaves
from titanlite.checkpoint.storage import load_tensors, save_tensors
from titanlite.runtime.torch_internals import local_part

RANKS = 4


class _Writer(dcp.FileSystemWriter):
    def storage_meta(self) -> None:
        """None: the metadata do not name the folder."""


def saved_by_torch(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    set_crc32_options(False)
    dcp.save(dict(tensors), storage_writer=_Writer(folder), planner=dcp.DefaultSavePlanner())
    set_crc32_options(True)


def state(step: int) -> dict[str, torch.Tensor]:
    """Sharded, replicated, uneven, empty and plain tensors; those of rank 3, as of a pipeline stage, differ."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    values = torch.arange(60.0).reshape(5, 12) + step
    tensors: dict[str, torch.Tensor] = {
        "model/a": distribute_tensor(values, mesh, [Shard(1), Shard(0)]),
        "model/b": distribute_tensor(values[:1], mesh, [Replicate(), Shard(0)]),
        "model/c": distribute_tensor(values[:, :6].to(torch.bfloat16), mesh, [Replicate(), Shard(1)]),
        "data/streams": torch.arange(6).reshape(2, 3) + step,
    }
    if dist.get_rank() == 3:
        tensors["model/own"] = values * 2
    return tensors


def with_average(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {"ema/a": tensors["model/a"] + 1}  # type: ignore[operator]


def saves(folder: str) -> dict[str, Any]:
    """Save one run, whose state changes. Per step: number of items and results that rank 0 has received, and the names
    of files that differ from torch's."""
    saves, group = PlannedSaves(), dist.new_group(backend="gloo")
    plan, content = PlannedSaves.global_plan, PlannedSaves.content
    seen: dict[str, Any] = {}
    counts = {"items": 0, "results": 0}

    def counted_plan(self: PlannedSaves, local: list[dcp.SavePlan]) -> Any:
        counts["items"] += sum(len(each.items) for each in local)
        return plan(self, local)

    def counted_content(self: PlannedSaves, changed: Any) -> bytes:
        counts["results"] += sum(map(len, changed))
        return content(self, changed)

    changes = [dict, dict, with_average, with_average, dict, _as_bfloat16, _as_bfloat16]
    with patch.multiple(PlannedSaves, global_plan=counted_plan, content=counted_content):
        for step, change in enumerate(changes):
            counts.update(items=0, results=0)
            place, reference = Path(folder, f"step-{step}"), Path(folder, f"torch-{step}")
            tensors = change(state(step))
            local = {name: local_part(tensor) for name, tensor in tensors.items()}
            save_tensors(place, tensors, local, group, saves=saves)
            saved_by_torch(reference, tensors)
            dist.barrier(group)
            files = {path.name: path.read_bytes() for path in reference.iterdir()}
            assert files == {path.name: path.read_bytes() for path in place.iterdir()}, step
            loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
            load_tensors(place, loaded, group)
            assert all(torch.equal(local_part(loaded[name]), local[name]) for name in tensors), step
            seen[str(step)] = [counts["items"], counts["results"]]
            dist.barrier(group)
    return seen


def _as_bfloat16(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same shards, of another dtype on one rank's tensor only."""
    return {name: tensor.to(torch.bfloat16) if name == "model/own" else tensor for name, tensor in tensors.items()}


def test_a_plan_is_made_once_and_again_after_a_change(tmp_path: Path) -> None:
    seen, *_ = run_ranks(saves, RANKS, str(tmp_path), timeout_s=60)
    items, results = 4 * RANKS + 1, 4 + 2 + 2 + 1 + 1
    averaged = [items + RANKS, results + 4]
    nothing = [0, 0]
    assert list(seen.values()) == [
        *([items, results], nothing, averaged, nothing),
        *([items, results], [items, results], nothing),
    ]


def fail_once(folder: str) -> bool:
    """A save that fails on one rank, and the next one."""
    saves, group = PlannedSaves(), dist.new_group(backend="gloo")
    tensors = state(0)
    local = {name: local_part(tensor) for name, tensor in tensors.items()}
    save_tensors(Path(folder, "step-1"), tensors, local, group, saves=saves)
    blocked = Path(folder, "step-2")
    blocked.mkdir(exist_ok=True)
    (blocked / "__2_0.distcp").touch()
    dist.barrier(group)
    with pytest.raises(dcp.CheckpointException) as raised:
        save_tensors(blocked, tensors, local, group, saves=saves)
    assert list(raised.value.failures) == [2]
    save_tensors(Path(folder, "step-3"), tensors, local, group, saves=saves)
    dist.barrier(group)
    first, last = ({path.name: path.read_bytes() for path in Path(folder, f"step-{step}").iterdir()} for step in (1, 3))
    return first == last


def test_a_save_after_a_failed_one_is_complete(tmp_path: Path) -> None:
    assert run_ranks(fail_once, RANKS, str(tmp_path), timeout_s=60) == [True] * RANKS
