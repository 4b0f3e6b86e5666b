"""What each rank computes at a start: the plan of its pipeline, and the shards of its parameters."""

import time
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param

from benchmarks.growth.count import Count
from titanlite.parallel.mesh import ParallelismConfig
from titanlite.planning.pipeline_order import bubble_share, schedule_order
from titanlite.runtime.torch_internals import shards_on_demand

STAGES = 16


def of_microbatches(count: int) -> Iterator[Count]:
    """The plan of a step of this many microbatches: `ranks` is their number."""
    section = ParallelismConfig(pp=STAGES, pp_schedule="1F1B")

    def plan() -> None:
        order = schedule_order(section, count)
        for actions in order:
            actions.peaks  # noqa: B018
        bubble_share(order, STAGES)

    yield Count("a plan of microbatches", count, "CPU s", cpu_s(plan))


def of_shards(size: int) -> Iterator[Count]:
    """The views of one parameter that fully_shard makes on each rank."""
    views = 0

    def narrow(tensor: torch.Tensor, *place: int) -> torch.Tensor:
        nonlocal views
        views += 1
        return original(tensor, *place)

    original = torch.Tensor.narrow
    with shards_on_demand(), patch.object(torch.Tensor, "narrow", narrow):
        parts = _fsdp_param._chunk_with_empty(torch.empty(size, 1), size, 0)
        parts[0], parts[size - 1]
    yield Count("shards of a parameter", size, "views", views)


def cpu_s(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin
