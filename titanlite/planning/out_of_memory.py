"""The message of a run that is out of memory: what was planned beside what was used."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from titanlite.config.schema import JobConfig
from titanlite.planning.memory import Memory
from titanlite.planning.remedies import describe_items, first_remedies
from titanlite.runtime.distributed import World
from titanlite.runtime.errors import UserError
from titanlite.runtime.memory import GIB, device_memory_bytes, is_out_of_memory, peak_memory_bytes
from titanlite.runtime.positions import FAULTS_FOLDER


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
        raise UserError(describe(config, memory, world, when(), error)) from None


def describe(config: JobConfig, memory: Memory | None, world: World, when: str, error: BaseException) -> str:
    """The message. On CUDA, also writes a snapshot of the allocator, if the dump folder can be written."""
    peak, has = peak_memory_bytes(world.device), device_memory_bytes(world.device)
    numbers = [f"peak {peak / GIB:.1f} GiB", f"the device has {has / GIB:.1f} GiB"]
    lines = []
    if memory is not None:
        numbers.insert(0, f"planned {memory.total / GIB:.1f} GiB")
        lines = [
            f"  largest items of the plan: {describe_items(memory.items)}",
            *(f"  remedy: {remedy}" for remedy in first_remedies(config, memory.items)),
        ]
    if world.device_type == "cuda" and (snapshot := write_snapshot(config, world)):
        lines.append(f"  the blocks of torch's allocator: {snapshot} (for pytorch.org/memory_viz)")
    first_line = f"{error}".partition("\n")[0] or type(error).__name__
    return "\n".join([f"rank {world.rank} is out of memory {when}: {', '.join(numbers)}", *lines, f"({first_line})"])


def write_snapshot(config: JobConfig, world: World) -> Path | None:
    """Write the blocks of torch's CUDA allocator, for its viewer; return the path, or None if the disk fails."""
    path = Path(config.job.dump_folder, FAULTS_FOLDER, f"memory-rank-{world.rank}.pickle")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
    except OSError:
        return None
    return path
