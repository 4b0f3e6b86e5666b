"""Saves of one run share a plan: their files are those of torch's own saves, and little is sent."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.serialization import set_crc32_options

from tests.pool import run_ranks
from titanlite.checkpoint import planning
from titanlite.checkpoint.manifest import GRID_FILE, METADATA_FILE
from titanlite.checkpoint.planning import PlannedSaves
from titanlite.checkpoint.storage import load_tensors, read_shapes, save_tensors
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


def saves(folder: str, most_listed: int) -> dict[str, Any]:
    """Save one run, whose state changes. Per step: number of items and results that rank 0 has received. Up to
    most_listed shards, the files are those that torch writes."""
    saves, group = PlannedSaves(), dist.new_group(backend="gloo")
    plan, content = PlannedSaves.plan, PlannedSaves.content
    seen: dict[str, Any] = {}
    counts = {"items": 0, "results": 0}

    def counted_plan(self: PlannedSaves, sent: list[dcp.SavePlan]) -> Any:
        counts["items"] += sum(len(each.items) + (each.planner_data is not None and not each.items) for each in sent)
        return plan(self, sent)

    def counted_content(self: PlannedSaves, changed: Any) -> bytes:
        counts["results"] += sum(map(len, changed))
        return content(self, changed)

    changes = [dict, dict, with_average, with_average, dict, _as_bfloat16, _as_bfloat16]
    with (
        patch.multiple(PlannedSaves, plan=counted_plan, content=counted_content),
        patch.object(planning, "MOST_LISTED", most_listed),
    ):
        for step, change in enumerate(changes):
            counts.update(items=0, results=0)
            place, reference = Path(folder, f"step-{step}"), Path(folder, f"torch-{step}")
            tensors = change(state(step))
            local = {name: local_part(tensor) for name, tensor in tensors.items()}
            save_tensors(place, tensors, local, group, saves=saves)
            if most_listed:
                saved_by_torch(reference, tensors)
                dist.barrier(group)
                files = {path.name: path.read_bytes() for path in reference.iterdir()}
                assert files == {path.name: path.read_bytes() for path in place.iterdir()}, step
            dist.barrier(group)
            assert (place / GRID_FILE).exists() != (place / METADATA_FILE).exists() == bool(most_listed)
            require_loaded(place, tensors, group)
            seen[str(step)] = [counts["items"], counts["results"]]
            dist.barrier(group)
    return seen


def require_loaded(place: Path, tensors: dict[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    """Load the checkpoint on the same mesh, on others, and on each rank alone."""
    full = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    rows = {name: distribute_tensor(full[name], line, [Shard(0)]) for name in full if name != "model/own"}
    columns = {name: distribute_tensor(full[name], square, [Shard(1), Shard(0)]) for name in rows}
    for expected, loading in ((tensors, group), (rows, group), (columns, group), (full, None)):
        loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        load_tensors(place, loaded, loading)
        assert all(torch.equal(local_part(loaded[name]), local_part(expected[name])) for name in expected)
    shapes = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in full.items()}
    assert read_shapes(place).items() >= shapes.items()


def _as_bfloat16(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same shards, of another dtype on one rank's tensor only."""
    return {name: tensor.to(torch.bfloat16) if name == "model/own" else tensor for name, tensor in tensors.items()}


def test_a_plan_is_made_once_and_again_after_a_change(tmp_path: Path) -> None:
    seen, *_ = run_ranks(saves, RANKS, str(tmp_path), planning.MOST_LISTED, timeout_s=60)
    items, results = 4 * RANKS + 1, 4 + 2 + 2 + 1 + 1
    averaged = [items + RANKS, results + 4]
    nothing = [0, 0]
    assert list(seen.values()) == [
        *([items, results], nothing, averaged, nothing),
        *([items, results], [items, results], nothing),
    ]


def test_with_a_grid_one_message_of_each_rank_describes_its_tensors(tmp_path: Path) -> None:
    seen, *_ = run_ranks(saves, RANKS, str(tmp_path), 0, timeout_s=60)
    all_ranks, nothing = [RANKS, RANKS], [0, 0]
    assert list(seen.values()) == [all_ranks, nothing, all_ranks, nothing, all_ranks, all_ranks, nothing]


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
