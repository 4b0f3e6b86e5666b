"""Whether the planned memory fits the devices, before a run allocates any; the message of a run that is out of memory;
the settings that reduce it."""

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from titanlite.config.schema import JobConfig
from titanlite.config.stages import stage_configs
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.pipeline import local_stages
from titanlite.planning.estimate import estimate_memory, has_estimate
from titanlite.planning.rank_memory import Memory
from titanlite.planning.stages import plan_stages
from titanlite.ranks.agreement import decide_on_rank_0
from titanlite.ranks.distributed import World
from titanlite.ranks.positions import FAULTS_FOLDER
from titanlite.runtime.errors import UsageError, UserError
from titanlite.runtime.logging import log, warn_in_lines
from titanlite.runtime.memory import GIB, USABLE, device_memory_bytes, is_out_of_memory, peak_memory_bytes
from titanlite.runtime.torch_internals import write_allocations


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


def plan_memory(config: JobConfig, mesh: Mesh) -> Memory | None:
    """Estimate the memory of this pipeline rank, in the training stage that needs most. None, with a warning, if the
    family cannot be planned."""
    if not has_estimate(config):
        log.warning("The memory of the family %s cannot be planned, so it is not checked", config.model.family)
        return None
    planned, pp_rank = plan_stages(config, mesh.degrees), mesh.coordinate["pp"]
    stages = [planned[index] for index in local_stages(config.parallelism, pp_rank)]
    needs = (
        estimate_memory(each, mesh.degrees, pp_rank, stages, device_type=mesh.world.device_type)
        for each in stage_configs(config)
    )
    return max(needs, key=lambda need: need.total)


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
    refused, lines = decide_on_rank_0(
        json.dumps(asdict(need)),
        lambda needs: verdict(config, [Need(**json.loads(each)) for each in needs]),
        *(world, dist.PrefixStore("memory", store), config.comm.init_timeout_s),
    )
    if refused:
        raise UsageError(*lines)
    if lines:
        warn_in_lines(lines)


def verdict(config: JobConfig, needs: Sequence[Need]) -> tuple[bool, list[str]]:
    """(whether the run is refused, lines that say why it does not fit or may not fit; [] if it fits)

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
        return refuses, [
            f"the model does not fit: {_needs('at least', sharing, needed)}; {then}",
            *_details(config, sharing),
            *(['  or start anyway, with memory.check = "warn"'] if refuses else ()),
        ]
    sharing = max(devices.values(), key=lambda ranks: sum(need.total for need in ranks) / ranks[0].available)
    if sum(need.total for need in sharing) > USABLE * sharing[0].available:
        needs_most = _needs("about", sharing, sum(need.total for need in sharing))
        head = f"the run may be out of memory: {needs_most} ({USABLE:.0%} are usable)"
        return False, [head, *_details(config, sharing)]
    return False, []


def _needs(about: str, sharing: Sequence[Need], count: int) -> str:
    """What the ranks of one device need, and what it has. count: in bytes."""
    one = sharing[0]
    ranks = f"rank {one.rank}" if len(sharing) == 1 else f"ranks {one.rank} to {sharing[-1].rank}"
    needs, has = ("needs", "has") if len(sharing) == 1 else ("need", "have")
    return f"{ranks} on {one.host} {needs} {about} {count / GIB:.1f} GiB and {has} {one.available / GIB:.1f} GiB"


def _details(config: JobConfig, sharing: Sequence[Need]) -> list[str]:
    """The largest items of the rank that needs most, and what reduces them."""
    return describe_items(config, max(sharing, key=lambda need: need.total).items, "of the plan, per rank")


@contextmanager
def explained_out_of_memory(
    config: JobConfig, memory: Memory | None, world: World, when: Callable[[], str]
) -> Iterator[None]:
    """Inside, a failed allocation raises UserError with the plan, the peak and remedies.

    memory: planned for this rank; None if unknown. when: returns for example "in step 3".
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(*describe(config, memory, world, when(), error)) from None


def describe(config: JobConfig, memory: Memory | None, world: World, when: str, error: BaseException) -> list[str]:
    """The lines of the message. On CUDA, also writes a snapshot of the allocator, if the dump folder can be written."""
    peak, has = peak_memory_bytes(world.device), device_memory_bytes(world.device)
    numbers = [f"peak {peak / GIB:.1f} GiB", f"the device has {has / GIB:.1f} GiB"]
    lines = []
    if memory is not None:
        numbers.insert(0, f"planned {memory.total / GIB:.1f} GiB")
        lines = describe_items(config, memory.items, "of the plan")
    if world.device_type == "cuda" and (snapshot := write_snapshot(config, world)):
        lines.append(f"  the blocks of torch's allocator: {snapshot} (for pytorch.org/memory_viz)")
    first_line = f"{error}".partition("\n")[0] or type(error).__name__
    return [f"rank {world.rank} is out of memory {when}: {', '.join(numbers)}", *lines, f"({first_line})"]


def write_snapshot(config: JobConfig, world: World) -> Path | None:
    """Write the blocks of torch's CUDA allocator, for its viewer; return the path, or None if the disk fails."""
    path = Path(config.job.dump_folder, FAULTS_FOLDER, f"memory-rank-{world.rank}.pickle")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_allocations(str(path))
    except OSError:
        return None
    return path


def remedies(config: JobConfig, item: str) -> list[str]:
    """Settings that reduce `item`, a name of Memory.items; those that change nothing for this configuration are
    left out."""
    section, training = config.parallelism, config.training
    ranks = "a larger parallelism.dp_shard, tp or pp (more ranks share the model)"
    if item == "activations":
        options = {
            "a smaller activation_checkpoint.memory_budget": config.activation_checkpoint.mode == "memory_budget",
            'activation_checkpoint.mode = "full"': config.activation_checkpoint.mode != "full",
            "training.local_batch_size = 1": section.pp == 1 and training.local_batch_size > 1,
            "parallelism.pp_microbatch_size = 1": section.pp > 1 and section.pp_microbatch_size > 1,
            "a smaller loss.chunk_tokens": config.loss.chosen.needs_logits and config.loss.chunk_tokens != 1,
            'parallelism.pp_schedule = "1F1B" (fewer microbatches in flight)': section.pp > 1
            and section.pp_schedule != "1F1B",
            "a larger parallelism.tp": True,
        }
        return [option for option, helps in options.items() if helps]
    adds_up = section.pp > 1 or section.gradient_sync == "last"  # gradients that are not reduced yet
    if item == "data parallel" or (item == "gradients" and adds_up):
        policy = ['parallelism.gradient_sync = "hybrid" or "every"']
        return [*(policy if section.pp == 1 and adds_up else ()), "a larger parallelism.tp or pp"]
    if item == "update":
        optimizer = config.optimizer
        if "Muon" not in (optimizer.name, *(group.optimizer for group in optimizer.groups)):
            return ['optimizer.name = "AdamW", which needs no copies', ranks]
        options = {
            'optimizer.newton_schulz_dtype = "bfloat16" (less precise updates)': optimizer.newton_schulz_dtype
            != "bfloat16",
            'optimizer.name = "AdamW"': True,
        }
        return [option for option, helps in options.items() if helps]
    if item == "pipeline":
        return ['parallelism.gradient_sync = "every" (fewer microbatches at once)', "a larger parallelism.tp"]
    options = {
        ranks: True,
        "parallelism.dp_replicate = 1 (shards over these ranks, too)": section.dp_replicate > 1,
        'training.dtype = "bfloat16" (less precise updates)': training.dtype != "bfloat16",
        "a smaller model (model.flavor)": True,
    }
    return [option for option, helps in options.items() if helps]


def describe_items(config: JobConfig, items: Mapping[str, int], of: str) -> list[str]:
    """Lines with the three largest items, and three settings that reduce them. items: bytes by name."""
    largest = sorted(items, key=lambda item: -items[item])[:3]
    found = [remedy for item in largest for remedy in remedies(config, item)]
    settings = list(dict.fromkeys([*found, "a shorter training.seq_len"]))[:3]
    sizes = ", ".join(f"{item} {items[item] / GIB:.1f} GiB" for item in largest)
    return [f"  largest items {of}: {sizes}", *(f"  remedy: {setting}" for setting in settings)]
