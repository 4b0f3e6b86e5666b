"""What the plan chooses at the start of a run, the same on all ranks: the layout, the size of a microbatch, the
stages of a pipeline.

parallelism.layout = "auto": the fastest layout that fits the machine. training.local_batch_size = -1: as many sequences
per microbatch as fit. An empty parallelism.pp_split: stages of equal time, or of equal size if those do not fit.
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
from titanlite.config.stages import stage_configs
from titanlite.parallel.mesh import resolve_degrees
from titanlite.parallel.pipeline import local_stages
from titanlite.planning.estimate import estimate_memory, has_estimate, plan_step, require_estimate
from titanlite.planning.hardware.calibration import calibrate, device_name
from titanlite.planning.hardware.machine import Profile, dump_profile, load_profile
from titanlite.planning.search import Found, search, with_settings
from titanlite.planning.stages import plan_stages, split_by_parameters
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
        return dict(found.best.settings)

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
    best, fastest, *others = found.best, *found.fastest
    training = best.config.training
    rate = training.global_batch_size * training.seq_len / best.time.total
    second = f"; the second fastest takes {others[0].time.total / best.time.total - 1:.0%} longer" if others else ""
    if best is not fastest:
        second = (
            f"; it has fewer axes than {fastest.mesh}, which is {best.time.total / fastest.time.total - 1:.1%} faster"
        )
    log.info(
        "Layout: auto: %s, recompute %s, microbatches of %s; predicted %.3g s per step, %s tokens/s by the profile "
        "of %s; %s of %s, searched in %.1f s%s",
        *(best.mesh, best.config.activation_checkpoint.mode, counted(best.rows, "sequence"), best.time.total),
        *(f"{rate:,.0f}", profile.name, "fastest" if best is fastest else "among the fastest"),
        *(counted(found.meshes, "mesh"), seconds, second),
    )


def agree_on_memory(config: JobConfig, world: World, store: dist.Store) -> JobConfig:
    """Set what depends on the memory of rank 0's device, the same on all ranks: see fit_memory. Raises ConfigError.

    On the CPU, the ranks of a node share its memory.
    """
    section = config.parallelism
    if config.training.local_batch_size != -1 and (section.pp == 1 or section.pp_split):
        return config

    def choose() -> tuple[int, tuple[str, ...]]:
        found = fit_memory(config, world.size, device_type=world.device_type, memory_bytes=memory_of_a_rank(world))
        return found.training.local_batch_size, found.parallelism.pp_split

    rows, split = share_from_rank_0("memory", choose, world, store, config.comm.init_timeout_s)
    return with_settings(config, {ROWS_KEY: rows, "parallelism.pp_split": tuple(split)})


def fit_memory(config: JobConfig, world_size: int, *, device_type: str, memory_bytes: int) -> JobConfig:
    """Replace training.local_batch_size = -1 by what fits `memory_bytes`, and set parallelism.pp_split if stages of
    equal time do not fit, and stages of equal size need less. Raises ConfigError.

    config: checked. memory_bytes: of a rank.
    """
    section = config.parallelism
    if config.training.local_batch_size == -1:
        about: dict[str, Any] = {"device_type": device_type, "memory_bytes": memory_bytes}
        rows = min(fit_local_batch_size(each, world_size, **about) for each in stage_configs(config))
        return with_settings(config, {ROWS_KEY: rows})
    if section.pp == 1 or section.pp_split or not has_estimate(config):
        return config

    sizes = resolve_degrees(section, world_size)

    def planned_peak(config: JobConfig) -> int:
        stages = plan_stages(config, sizes)
        own = [[stages[index] for index in local_stages(section, rank)] for rank in range(section.pp)]
        return max(
            estimate_memory(of_stage, sizes, rank, each, device_type=device_type).total
            for of_stage in stage_configs(config)
            for rank, each in enumerate(own)
        )

    by_size = with_settings(config, {"parallelism.pp_split": split_by_parameters(config)})
    by_time, smaller = planned_peak(config), planned_peak(by_size)
    if by_time <= USABLE * memory_bytes or by_time <= smaller:
        return config
    log.info(
        "Pipeline: stages of equal time need %.1f GiB of %.1f GiB, and stages of equal size %.1f GiB, so "
        "parallelism.pp_split balances parameters",
        *(by_time / GIB, memory_bytes / GIB, smaller / GIB),
    )
    return by_size


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
