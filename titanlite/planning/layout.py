"""The choice of parallelism.layout = "auto": the fastest layout that fits the machine, the same on all ranks."""

import platform
from collections.abc import Collection
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from titanlite.config.schema import JobConfig
from titanlite.planning.estimate import require_estimate
from titanlite.planning.hardware.calibrate import calibrate, device_name
from titanlite.planning.hardware.profile import Profile, dump_profile, load_profile
from titanlite.planning.search import Found, search, with_settings
from titanlite.runtime.agreement import share_from_rank_0
from titanlite.runtime.cache import cache_folder, content_key
from titanlite.runtime.distributed import World
from titanlite.runtime.durability import replace_file
from titanlite.runtime.errors import UsageError
from titanlite.runtime.logging import log
from titanlite.runtime.memory import GIB, USABLE, device_memory_bytes
from titanlite.runtime.text import counted


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
        sharing = world.local_size if world.device_type == "cpu" else 1
        memory_gib = device_memory_bytes(world.device) / GIB / sharing
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
