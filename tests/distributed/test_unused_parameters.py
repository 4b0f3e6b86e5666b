"""A parameter without a gradient on one rank still takes part in every reduction."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tests.distributed.gradients import connected_mesh, difference, full_tensor
from tests.pool import run_ranks
from titanlite.models.family import Structure
from titanlite.parallel.data import apply_data_parallel, set_gradient_sync
from titanlite.parallel.mesh import ModelDtypes, ParallelismConfig

STRUCTURE = Structure(units=(("first",), ("second",)), blocks={})
CAN_REDUCE_MISSING = hasattr(FSDPModule, "set_reduce_scatter_unused_params")


class Branch(nn.Module):
    """Two layers; the second one is used only if `everything` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(5, 5, bias=False)
        self.sometimes = nn.Linear(5, 5, bias=False)

    def forward(self, x: Tensor, everything: bool) -> Tensor:
        out: Tensor = self.always(x)
        return out + self.sometimes(x) if everything else out


class TwoBranches(nn.Module):
    """Two branches in sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Branch(), Branch()
        self.double()

    def forward(self, x: Tensor, everything: bool) -> Tensor:
        out: Tensor = self.second(self.first(x, everything), everything)
        return out


def inputs(rank: int) -> Tensor:
    return torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def error_with_unused_parameters(replicate: int, shard: int, sync: str, accumulation: int) -> float:
    """Gradient error if only rank 0 uses all parameters, in its first microbatch."""
    size, rank = dist.get_world_size(), dist.get_rank()
    reference, model = TwoBranches(), TwoBranches()
    mesh = connected_mesh(ParallelismConfig(dp_replicate=replicate, dp_shard=shard)).device_mesh
    apply_data_parallel(model, STRUCTURE, mesh, None, ModelDtypes(*[torch.float64] * 3), "default")
    for microbatch in range(accumulation):
        for other in range(size):
            reference(inputs(other + 10 * microbatch), other == 0 and microbatch == 0).square().sum().backward()
        set_gradient_sync([model], sync, is_last=microbatch == accumulation - 1)
        model(inputs(rank + 10 * microbatch), rank == 0 and microbatch == 0).square().sum().backward()
    expected = dict(reference.named_parameters())
    errors = []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert expected[name].grad is not None, name
        errors.append(difference(full_tensor(parameter.grad), expected[name].grad))
    return max(errors)


def all_errors(layouts: list[tuple[int, int]]) -> dict[str, float]:
    return {
        f"replicate {replicate} x shard {shard}, {sync}, accumulation {accumulation}": error_with_unused_parameters(
            replicate, shard, sync, accumulation
        )
        for replicate, shard in layouts
        for sync in ("every", "last", "hybrid")
        for accumulation in (1, 2)
    }


@pytest.mark.skipif(not CAN_REDUCE_MISSING, reason="this torch cannot reduce gradients that are missing on some ranks")
@pytest.mark.parametrize(
    ("world_size", "layouts"), [(2, [(2, 1), (1, 2)]), pytest.param(4, [(2, 2)], marks=pytest.mark.slow)]
)
def test_missing_gradients_count_as_zero(world_size: int, layouts: list[tuple[int, int]]) -> None:
    for errors in run_ranks(all_errors, world_size, layouts):
        assert {case: error for case, error in errors.items() if error > 1e-12} == {}
