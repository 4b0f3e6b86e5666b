"""The comparison of the planned memory with that of the devices, before a run allocates any."""

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

from titanlite.config.schema import JobConfig
from titanlite.parallel.mesh import Mesh
from titanlite.planning.estimate import estimate_memory, has_estimate
from titanlite.planning.memory import Memory
from titanlite.planning.remedies import describe_items, first_remedies
from titanlite.planning.stages import ModelPart, measure_stage
from titanlite.runtime.agreement import decide_on_rank_0
from titanlite.runtime.distributed import World
from titanlite.runtime.errors import UsageError
from titanlite.runtime.logging import log
from titanlite.runtime.memory import GIB, USABLE, device_memory_bytes


@dataclass(frozen=True)
class Need:
    """What one rank needs, and what its device has, in bytes.

    device: equal on ranks that share a device. lower_bound: what it certainly needs. items: the planned peak, by item.
    """

    rank: int
    host: str
    device: int
    lower_bound: int
    items: dict[str, int]
    available: int

    @property
    def total(self) -> int:
        return sum(self.items.values())


def plan_memory(config: JobConfig, mesh: Mesh, parts: Sequence[ModelPart]) -> Memory | None:
    """Estimate the memory of this rank with these parts. None, with a warning, if the family cannot be planned."""
    if not has_estimate(config):
        log.warning("The memory of the family %s cannot be planned, so it is not checked", config.model.family)
        return None
    stages = [measure_stage(config, mesh, part) for part in parts]
    return estimate_memory(config, mesh.degrees, mesh.coordinate["pp"], stages, device_type=mesh.world.device_type)


def check_memory(config: JobConfig, memory: Memory, world: World, store: dist.Store) -> None:
    """Compare what all ranks need with what their devices have: warn on rank 0, or refuse. Waits for all ranks.

    memory: planned for this rank. Each rank may differ in its need and its device. Raises UsageError, with the same
    text on all ranks.
    """
    if config.memory.check == "off":
        return
    # The ranks of a node share its memory; each has a GPU of its own.
    device = world.rank - world.local_rank if world.device_type == "cpu" else world.rank
    available = device_memory_bytes(world.device)
    need = Need(world.rank, socket.gethostname(), device, memory.lower_bound, memory.items, available)
    refused, text = decide_on_rank_0(
        json.dumps(asdict(need)),
        lambda needs: verdict(config, [Need(**json.loads(each)) for each in needs]),
        *(world, dist.PrefixStore("memory", store), config.comm.init_timeout_s),
    )
    if refused:
        raise UsageError(text)
    if text:
        log.warning("%s", text)


def verdict(config: JobConfig, needs: Sequence[Need]) -> tuple[bool, str]:
    """(whether the run is refused, why it does not fit or may not fit; "" if it fits)

    A run is too large if what the ranks of a device certainly need exceeds it, and may be too large if their planned
    peaks exceed the usable share of it.
    """
    devices: dict[int, list[Need]] = {}
    for need in needs:
        devices.setdefault(need.device, []).append(need)
    sharing = max(devices.values(), key=lambda ranks: sum(need.lower_bound for need in ranks) / ranks[0].available)
    needed = sum(need.lower_bound for need in sharing)
    if needed > sharing[0].available:
        refuses = config.memory.check == "refuse"
        then = "nothing was allocated" if refuses else 'the run starts anyway (memory.check = "warn")'
        return refuses, "\n".join(
            [
                f"the model does not fit: {_needs('at least', sharing, needed)}; {then}",
                *_details(config, sharing),
                *(['  or start anyway, with memory.check = "warn"'] if refuses else ()),
            ]
        )
    sharing = max(devices.values(), key=lambda ranks: sum(need.total for need in ranks) / ranks[0].available)
    if sum(need.total for need in sharing) > USABLE * sharing[0].available:
        needs_most = _needs("about", sharing, sum(need.total for need in sharing))
        head = f"the run may be out of memory: {needs_most} ({USABLE:.0%} are usable)"
        return False, "\n".join([head, *_details(config, sharing)])
    return False, ""


def _needs(about: str, sharing: Sequence[Need], count: int) -> str:
    """What the ranks of one device need, and what it has. count: in bytes."""
    one = sharing[0]
    ranks = f"rank {one.rank}" if len(sharing) == 1 else f"ranks {one.rank} to {sharing[-1].rank}"
    needs, has = ("needs", "has") if len(sharing) == 1 else ("need", "have")
    return f"{ranks} on {one.host} {needs} {about} {count / GIB:.1f} GiB and {has} {one.available / GIB:.1f} GiB"


def _details(config: JobConfig, sharing: Sequence[Need]) -> list[str]:
    """The largest items of the rank that needs most, and what reduces them."""
    items = max(sharing, key=lambda need: need.total).items
    return [
        f"  largest items of the plan, per rank: {describe_items(items)}",
        *(f"  remedy: {remedy}" for remedy in first_remedies(config, items)),
    ]
