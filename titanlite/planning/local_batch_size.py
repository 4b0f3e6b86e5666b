"""The choice of training.local_batch_size = -1: as many sequences per microbatch as fit, by the plan."""

from bisect import bisect_right
from dataclasses import replace

import torch.distributed as dist

from titanlite.config.schema import JobConfig
from titanlite.parallel.mesh import resolve_degrees
from titanlite.planning.estimate import estimate_memory, plan_step, require_estimate
from titanlite.planning.stages import plan_stages
from titanlite.runtime.agreement import share_from_rank_0
from titanlite.runtime.distributed import World
from titanlite.runtime.logging import log
from titanlite.runtime.memory import GIB, USABLE, device_memory_bytes

KEY = "training.local_batch_size"
FILLER = 0.1
"""Share of filler in the rows of a step that the chosen size may add."""


def agree_on_local_batch_size(config: JobConfig, world: World, store: dist.Store) -> JobConfig:
    """Replace training.local_batch_size = -1 by what fits into the device of rank 0, the same on all ranks.

    On the CPU, the ranks of a node share its memory. Raises ConfigError.
    """
    if config.training.local_batch_size != -1:
        return config

    def choose() -> int:
        sharing = world.local_size if world.device_type == "cpu" else 1
        memory = device_memory_bytes(world.device) // sharing
        return fit_local_batch_size(config, world.size, device_type=world.device_type, memory_bytes=memory)

    rows = share_from_rank_0("local_batch_size", choose, world, store, config.comm.init_timeout_s)
    return replace(config, training=replace(config.training, local_batch_size=rows))


def fit_local_batch_size(config: JobConfig, world_size: int, *, device_type: str, memory_bytes: int) -> int:
    """The largest number of sequences whose planned peak fits the usable share of `memory_bytes`, and which needs at
    most FILLER more filler than 1; else 1. Raises ConfigError if the family has no estimate.

    config: checked, with a global batch size and without a pipeline.
    """
    require_estimate(config, KEY, -1, f"set {KEY}")

    def with_rows(rows: int) -> JobConfig:
        return replace(config, training=replace(config.training, local_batch_size=rows))

    sizes = resolve_degrees(config.parallelism, world_size)
    stages, single = plan_stages(config, sizes), plan_step(with_rows(1), sizes)

    def planned_peak(rows: int) -> int:
        return estimate_memory(with_rows(rows), sizes, 0, stages, device_type=device_type).total

    # the peak grows with rows
    fitting = bisect_right(range(1, single.sequences + 1), USABLE * memory_bytes, key=planned_peak)
    divisions = (plan_step(with_rows(rows), sizes) for rows in range(max(fitting, 1), 0, -1))
    chosen = next(division for division in divisions if division.filler_share <= single.filler_share + FILLER)
    planned = planned_peak(chosen.size)
    log.info(
        "Batch: %s = -1: %d sequences per microbatch, accumulation %d; planned peak %.1f GiB of %.1f GiB",
        *(KEY, chosen.size, chosen.batches, planned / GIB, memory_bytes / GIB),
    )
    return chosen.size
