"""What the plan chooses at the start of a run, the same on all ranks: the layout and the size of a microbatch.

parallelism.layout = "auto": the fastest layout that fits the machine. training.local_batch_size = -1: as many sequences
per microbatch as fit.
"""

import platform
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from titanlite.config.schema import JobConfig
from titanlite.parallel.mesh import resolve_degrees
from titanlite.planning.estimate import estimate_memory, plan_step, require_estimate
from titanlite.planning.hardware.calibration import calibrate, device_name
from titanlite.planning.hardware.machine import Profile, dump_profile, load_profile
from titanlite.planning.search import Found, search, with_settings
from titanlite.planning.stages import plan_stages
from titanlite.ranks.agreement import share_from_rank_0
from titanlite.ranks.distributed import World
from titanlite.runtime.cache import cache_folder, content_key
from titanlite.runtime.durability import replace_file
from titanlite.runtime.errors import UsageError
from titanlite.runtime.logging import log
from titanlite.runtime.memory import GIB, USABLE, device_memory_bytes
from titanlite.runtime.text import counted

ROWS_KEY = "training.local_batch_size"
FILLER = 0.1
"""Share of filler in the rows of a step that the chosen size may add."""


def memory_of_a_rank(world: World) -> int:
    """Bytes of this rank's device, or on a CPU its share of the node's memory."""
    return device_memory_bytes(world.device) // (world.local_size if world.device_type == "cpu" else 1)


def agree_on_layout(config: JobConfig, kept: Collection[str], world: World, store: dist.Store) -> JobConfig:
    """Replace parallelism.layout = "auto" by the fastest layout, which rank 0 chooses for all. A collective.

    config: read for an unknown layout. kept: full keys that keep their values. Raises UsageError.
    """
    if config.parallelism.layout == "given":
        return config
    require_estimate(config, "parallelism.layout", "auto", 'write "given", and the degrees of the mesh')
    store = dist.PrefixStore("layout", store)
    profile = _profile(config, world, store)

    def choose() -> dict[str, Any]:
        assert profile is not None
        memory_gib = memory_of_a_rank(world) / GIB
        start = perf_counter()
        found = search(config, world.size, profile, memory_gib=memory_gib, kept=kept)
        if not found.fastest:
            raise UsageError(
                f'parallelism.layout = "auto": no layout of {counted(world.size, "rank")} fits the checks of the '
                f"configuration and {USABLE * memory_gib:.1f} GiB of memory per rank: start more ranks, set fewer keys "
                "of [parallelism], or see titanlite plan --search"
            )
        _log_choice(found, profile, perf_counter() - start)
        return dict(found.fastest[0].settings)

    settings = share_from_rank_0("settings", choose, world, store, config.comm.init_timeout_s)
    return with_settings(config, settings)


def _profile(config: JobConfig, world: World, store: dist.Store) -> Profile | None:
    """The profile that the configuration names, or that of this machine, measured unless it is in the cache; on rank 0
    at least. A collective."""
    if config.parallelism.hardware:
        return load_profile(config.parallelism.hardware) if world.rank == 0 else None
    dtype = config.training.mixed_precision_param
    nodes = -(-world.size // world.local_size)
    facts = [platform.node(), device_name(world), world.local_size, min(nodes, 2), dtype, torch.__version__]
    file = cache_folder() / "hardware" / f"{content_key(facts)}.toml"
    if share_from_rank_0("measured", file.is_file, world, store, config.comm.init_timeout_s):
        return load_profile(str(file)) if world.rank == 0 else None
    if world.rank == 0:
        log.info("Layout: measuring this machine, about a minute; the profile is kept in %s", file)
    profile = calibrate(world, store, [dtype])
    if profile is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, dump_profile(profile).encode())
    return profile


def _log_choice(found: Found, profile: Profile, seconds: float) -> None:
    best, *others = found.fastest
    training = best.config.training
    rate = training.global_batch_size * training.seq_len / best.time.total
    second = f"; the second fastest takes {others[0].time.total / best.time.total - 1:.0%} longer" if others else ""
    log.info(
        "Layout: auto: %s, recompute %s, microbatches of %s; predicted %.3g s per step, %s tokens/s by the profile "
        "of %s; fastest of %s, searched in %.1f s%s",
        *(best.mesh, best.config.activation_checkpoint.mode, counted(best.rows, "sequence"), best.time.total),
        *(f"{rate:,.0f}", profile.name, counted(found.meshes, "mesh"), seconds, second),
    )


def agree_on_local_batch_size(config: JobConfig, world: World, store: dist.Store) -> JobConfig:
    """Replace training.local_batch_size = -1 by what fits into the device of rank 0, the same on all ranks.

    On the CPU, the ranks of a node share its memory. Raises ConfigError.
    """
    if config.training.local_batch_size != -1:
        return config

    def choose() -> int:
        memory = memory_of_a_rank(world)
        return fit_local_batch_size(config, world.size, device_type=world.device_type, memory_bytes=memory)

    rows = share_from_rank_0("local_batch_size", choose, world, store, config.comm.init_timeout_s)
    return replace(config, training=replace(config.training, local_batch_size=rows))


def fit_local_batch_size(config: JobConfig, world_size: int, *, device_type: str, memory_bytes: int) -> int:
    """The largest number of sequences whose planned peak fits the usable share of `memory_bytes`, and which needs at
    most FILLER more filler than 1; else 1. Raises ConfigError if the family has no estimate.

    config: checked, with a global batch size and without a pipeline.
    """
    require_estimate(config, ROWS_KEY, -1, f"set {ROWS_KEY}")

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
        *(ROWS_KEY, chosen.size, chosen.batches, planned / GIB, memory_bytes / GIB),
    )
    return chosen.size
