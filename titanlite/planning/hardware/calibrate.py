"""Measure the machine of the running ranks: a collective, in about a minute."""

import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

import torch
import torch.distributed as dist

from titanlite.models.attention import attention_dtype
from titanlite.planning.hardware.measure import (
    Clock,
    attention_rates,
    links,
    matmul_rates,
    memory_rates,
    operation_seconds,
    unit_seconds,
)
from titanlite.planning.hardware.profile import Link, Profile
from titanlite.precision import DTYPES
from titanlite.runtime.agreement import share_from_rank_0
from titanlite.runtime.distributed import CommConfig, World, init_process_group
from titanlite.runtime.logging import log
from titanlite.runtime.memory import GIB, device_memory_bytes
from titanlite.runtime.peak_flops import device_peak_flops


def calibrate(world: World, store: dist.Store, dtypes: Sequence[str]) -> Profile | None:
    """Measure on all ranks; returns the profile on rank 0.

    dtypes: of computation. store: connected; the process group is created and destroyed here. On a CPU, only as many
    ranks compute at the same time as it has cores, and each with one thread. All nodes are taken to be as the first.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    store = dist.PrefixStore("calibrate", store)
    own = world.local_size, world.local_size if world.device_type == "cuda" else min(cores(), world.local_size)
    per_node, computing = share_from_rank_0("node", lambda: own, world, store, CommConfig.init_timeout_s)
    node: dict[str, Link] = {}
    cluster: dict[str, Link] = {}
    clock = Clock(world.device, None)
    if world.size > 1:
        init_process_group(world, store, CommConfig())
        node, cluster, clock = _network(world, per_node, computing)
    found = _compute(world, clock, dtypes, computing, node, cluster) if world.rank % per_node < computing else None
    if world.size > 1:
        dist.barrier()
        dist.destroy_process_group()
    torch.set_num_threads(threads)
    return found if world.rank == 0 else None


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def device_name(world: World) -> str:
    """The accelerator, or the cores of the CPU."""
    return torch.cuda.get_device_name(world.device) if world.device_type == "cuda" else f"{cores()} CPU cores"


def _compute(
    world: World, clock: Clock, dtypes: Sequence[str], computing: int, node: dict[str, Link], cluster: dict[str, Link]
) -> Profile:
    wide = [str(torch.promote_types(DTYPES[name], torch.float32)).removeprefix("torch.") for name in dtypes]
    rates = {name: DTYPES[name] for name in sorted({*dtypes, *wide})}  # routers compute in the wide one
    log.info("Measuring matrix products")
    matmul = {name: matmul_rates(clock, dtype) for name, dtype in rates.items()}
    log.info("Measuring attention")
    of_attention = {attention_dtype(world.device_type, dtype) for dtype in rates.values()}
    attention = {str(dtype).removeprefix("torch."): attention_rates(clock, dtype) for dtype in of_attention}
    log.info("Measuring memory and overhead")
    memory, operation_s = memory_rates(clock), operation_seconds(clock)
    sharing = 1 if world.device_type == "cuda" else world.local_size
    return Profile(
        name=f"{platform.node()}: {device_name(world)}",
        device="cuda" if world.device_type == "cuda" else "cpu",
        ranks_per_node=world.local_size,
        computing=computing,
        memory_gib=device_memory_bytes(world.device) / GIB / sharing,
        peak_flops={
            name: device_peak_flops(world.device, dtype) or max(matmul[name].values) for name, dtype in rates.items()
        },
        matmul=matmul,
        attention=attention,
        memory=memory,
        operation_s=operation_s,
        unit_s=unit_seconds(clock, node) if clock.group is not None and node else operation_s,
        network={scope: each for scope, each in (("node", node), ("cluster", cluster)) if each},
        sources={"all": f"titanlite calibrate, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}"},
    )


def _network(world: World, per_node: int, computing: int) -> tuple[dict[str, Link], dict[str, Link], Clock]:
    """Links of a node and, with several nodes, between them; the clock of the ranks that compute. A collective."""
    log.info("Measuring collectives")
    nodes = range(0, world.size, per_node)  # by their first rank
    inside = [_clock(world, [range(first, first + n) for first in nodes]) for n in sorted({2, per_node})]
    between = _clock(world, [nodes])
    together = _clock(world, [[first + rank for first in nodes for rank in range(computing)]])
    measured = [clock for clock in inside if clock.group is not None]
    node = links(measured) if measured else {}
    cluster = links([between]) if between.group is not None else {}
    return node, cluster, together


def _clock(world: World, groups: Sequence[Sequence[int]]) -> Clock:
    """The clock of the group that has this rank; without a group if none has. A collective: creates all of them."""
    found = None
    for group_ranks in groups:
        ranks = [rank for rank in group_ranks if rank < world.size]
        group = dist.new_group(ranks) if len(ranks) > 1 else None
        found = group if world.rank in ranks else found
    return Clock(world.device, found)
