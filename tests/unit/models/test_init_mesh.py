"""Initial weights of DTensors: on every mesh, the shard of each rank equals the one-process weights bit for bit.

Ranks are simulated one after another with the fake process group, which needs no peers.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from titanlite.models.family import Init
from titanlite.models.init import init_parameters_

NORMAL = Init("normal", 0.02)


@contextmanager
def _rank(rank: int, degrees: tuple[int, ...]) -> Iterator[DeviceMesh]:
    world_size = torch.Size(degrees).numel()
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        # DTensor's caches compare meshes by shape and names, so the names must differ by rank.
        names = (f"dp_{rank}", f"tp_{rank}")[: len(degrees)]
        yield init_device_mesh("cpu", degrees, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


CASES: list[tuple[tuple[int, ...], tuple[Placement, ...], tuple[int, ...]]] = [
    ((4,), (Replicate(),), (6, 5)),
    ((4,), (Shard(0),), (8, 5)),
    ((4,), (Shard(0),), (6, 5)),  # uneven: the shard of the last rank is empty
    ((4,), (Shard(0),), (3,)),
    ((3,), (Shard(1),), (4, 7)),
    ((2, 2), (Shard(0), Shard(0)), (9, 4)),
    ((2, 2), (Shard(0), Shard(1)), (7, 5)),
    ((2, 2), (Replicate(), Shard(1)), (7, 6)),
    ((2, 3), (Shard(1), Shard(0)), (1100, 1000)),
]


@pytest.mark.parametrize(("degrees", "placements", "shape"), CASES, ids=str)
def test_any_placement(degrees: tuple[int, ...], placements: tuple[Placement, ...], shape: tuple[int, ...]) -> None:
    reference = nn.ParameterDict({"w": nn.Parameter(torch.empty(shape))})
    init_parameters_(reference, 3, lambda _: NORMAL)
    for rank in range(torch.Size(degrees).numel()):
        with _rank(rank, degrees) as mesh:
            expected = distribute_tensor(reference["w"].detach(), mesh, placements, src_data_rank=None)
            empty = torch.full_like(expected, float("nan"))
            module = nn.ParameterDict({"w": nn.Parameter(empty)})
            init_parameters_(module, 3, lambda _: NORMAL)
            assert torch.equal(module["w"].detach().to_local(), expected.to_local()), f"rank {rank}"


class _Pair(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(12, hidden, bias=False)
        self.down = nn.Linear(hidden, 10, bias=False)


@pytest.mark.parametrize("hidden", [16, 20])
def test_fully_shard_over_tensor_parallelism(hidden: int) -> None:
    """Both axes shard `up` along dim 0 (a strided shard); hidden = 20 is cut into 2, then unevenly into 4."""
    reference = _Pair(hidden)
    init_parameters_(reference, 3, lambda _: NORMAL)
    expected = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    seen = {name: torch.zeros_like(parameter) for name, parameter in expected.items()}
    for rank in range(8):
        with _rank(rank, (4, 2)) as mesh:
            with torch.device("meta"):
                model = _Pair(hidden)
            parallelize_module(model, mesh[f"tp_{rank}"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(model, mesh=mesh[f"dp_{rank}"])
            model.to_empty(device="cpu")
            init_parameters_(model, 3, lambda _: NORMAL)
            tp_rank, dp_rank = rank % 2, rank // 2
            for name, parameter in model.named_parameters():
                assert isinstance(parameter, DTensor)
                dim = 0 if name == "up.weight" else 1
                part = expected[name].chunk(2, dim)[tp_rank].chunk(4, 0)
                rows = part[dp_rank] if dp_rank < len(part) else part[0][:0]
                assert torch.equal(parameter.detach().to_local(), rows), f"rank {rank}, {name}"
                covered = seen[name].chunk(2, dim)[tp_rank].chunk(4, 0)
                if dp_rank < len(covered):
                    covered[dp_rank].add_(1)
    for name, count in seen.items():
        assert torch.equal(count, torch.ones_like(count)), name
