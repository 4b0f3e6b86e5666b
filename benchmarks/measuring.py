"""Parts that the benchmarks share: a trainer on random tokens, measurements in turns, peak memory, and the report."""

import ctypes
import json
import os
import platform
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from titanlite.assembly.job import job_of
from titanlite.assembly.model import build_model, build_trainer
from titanlite.batch import Batch
from titanlite.config.load import load_config
from titanlite.config.schema import JobConfig
from titanlite.forward import on_device
from titanlite.models.attention import pin_kernels
from titanlite.models.family import resolve_model
from titanlite.parallel.mesh import Mesh
from titanlite.ranks.distributed import CommConfig, World
from titanlite.ranks.launch import run_ranks
from titanlite.ranks.network import init_process_group
from titanlite.runtime.errors import UsageError
from titanlite.runtime.memory import peak_memory_bytes
from titanlite.trainer import Trainer

_M_MMAP_THRESHOLD = -3  # of malloc.h
CPU = torch.device("cpu")
MIB = 2**20
Layout = Literal["single", "dp_shard", "dp_replicate", "tp", "pp"]
LAYOUTS: dict[Layout, tuple[int, tuple[str, ...]]] = {
    "single": (1, ()),
    "dp_shard": (2, ("parallelism.dp_shard=2",)),
    "dp_replicate": (2, ("parallelism.dp_replicate=2", "parallelism.dp_shard=1")),
    "tp": (2, ("parallelism.tp=2",)),
    "pp": (2, ("parallelism.pp=2",)),
}
"""Layout -> number of ranks, settings."""

Row = Mapping[str, str | float | Sequence[float]]
"""A line of a table: column -> text, number, or a number per round."""


def number(value: float, form: str = "") -> str:
    """The number in a format; by default four digits, or all before the point."""
    if form or isinstance(value, int):
        return format(value, form or ",")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """value / other of each round."""
    return [value / other for value, other in zip(values, others, strict=True)]


def costs(run: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """(peak over the start in MiB, CPU seconds of the faster of two passes), of run() and its backward pass."""
    start, seconds = reset_peak(), []
    for _ in range(2):
        begin = time.thread_time()
        run().sum().backward()
        seconds.append(time.thread_time() - begin)
    return (peak_bytes() - start) / MIB, min(seconds)


def layer_costs(
    forward: Callable[[torch.Tensor], torch.Tensor], seq_len: int, dim: int, dtype: torch.dtype
) -> tuple[float, float]:
    """The costs of a layer with one thread and one row."""
    torch.set_num_threads(1)
    x = torch.randn(1, seq_len, dim, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    return costs(lambda: forward(x))


def compared(
    measure: Callable[..., tuple[float, float]], cases: Sequence[str], rounds: int, reference: str, *arguments: Any
) -> list[Row]:
    """The costs of each case in a process of its own, beside those of the first one. measure: called with a case and
    the arguments. reference: name of the first case in the columns."""
    found = [[run_ranks(measure, 1, case, *arguments, timeout_s=3600)[0] for case in cases] for _ in range(rounds)]
    peaks, seconds = ([[one[n][kind] for one in found] for n in range(len(cases))] for kind in (0, 1))
    return [
        {
            "form": case,
            "peak (MiB)": peaks[n],
            f"peak / {reference}": ratios(peaks[n], peaks[0]),
            "CPU (s)": seconds[n],
            f"CPU / {reference}": ratios(seconds[n], seconds[0]),
        }
        for n, case in enumerate(cases)
    ]


def rows_by_length(
    measure: Callable[..., tuple[float, float]],
    cases: Sequence[str],
    lengths: Sequence[int],
    rounds: int,
    reference: str,
    argument: Any,
) -> list[Row]:
    """As `compared`, for each length of a sequence, which precedes `argument`."""
    return [
        {"tokens": str(length), **row}
        for length in lengths
        for row in compared(measure, cases, rounds, reference, length, argument)
    ]


def in_turns(
    sides: Mapping[str, Callable[[], object]],
    rounds: int,
    count: int,
    wait: Callable[[], object],
    prepare: Callable[[str], object] = lambda _side: None,
) -> dict[str, list[tuple[float, float]]]:
    """(elapsed seconds, CPU seconds of this process) per call of each side in each round of `count` calls.

    The order of the sides alternates. wait: returns when everything that was launched has been computed. prepare:
    called with the name of a side before each of its measurements.
    """
    seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for round_ in range(rounds):
        for side in sides if round_ % 2 == 0 else reversed(list(sides)):
            prepare(side)
            wait()
            begin, worked = time.perf_counter(), time.process_time()
            for _ in range(count):
                sides[side]()
            wait()
            elapsed, worked = time.perf_counter() - begin, time.process_time() - worked
            seconds[side].append((elapsed / count, worked / count))
    return seconds


def report(
    name: str, tables: Mapping[str, Sequence[Row]], folder: Path | None, forms: Mapping[str, str] | None = None
) -> None:
    """Print each table of a benchmark in Markdown; write them to NAME.json of the folder, with facts of this machine.

    Several numbers, one per round, become median (minimum to maximum). tables: by title. forms: formats of the numbers
    of some columns, in place of that of `number`.
    """

    def cell(value: str | float | Sequence[float], form: str) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, int | float):
            return number(value, form)
        middle, least, most = (number(f(value), form) for f in (statistics.median, min, max))
        return f"{middle} ({least} to {most})"

    for title, rows in tables.items():
        columns = list(dict.fromkeys(column for row in rows for column in row))
        cells = [[cell(row.get(column, ""), (forms or {}).get(column, "")) for column in columns] for row in rows]
        lines = [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *cells)]
        print("\n".join([f"{title}:", "", *lines, ""]), flush=True)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        figures = {"machine": machine(), "tables": tables}
        (folder / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n", "utf-8")


def machine() -> dict[str, str | int]:
    """What the figures depend on besides the code."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        "cpu": model,
        "cores": os.cpu_count() or 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
    }


def threads_per_process(processes: int) -> int:
    return max(1, (os.cpu_count() or 1) // processes)


def reset_peak(device: torch.device = CPU) -> int:
    """Set the peak that peak_bytes returns to the present size; return it. CPU: Linux only."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes(device)


def peak_bytes(device: torch.device = CPU) -> int:
    """Peak since reset_peak, in bytes: of the resident memory of this process, or of the tensors on its GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_memory_bytes(device)


def wait_for_all(device: torch.device) -> None:
    """Return when all ranks have computed what they launched on their devices."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def use_device(device_type: str) -> torch.device:
    """This rank's device. For GPUs, the process group of run_ranks is replaced by the one of training."""
    if device_type == "cpu":
        return CPU
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    store.add("connected", 1)
    while store.add("connected", 0) < size:  # else a rank would close connections that others still establish
        time.sleep(0.01)
    dist.destroy_process_group()
    world = World(rank, rank, size, device_type)
    pin_kernels(world.device)
    init_process_group(world, store, CommConfig())
    return world.device


def give_memory_back() -> None:
    """Make the C library (glibc) give freed memory of this process back at once, if it is a page or more.

    Then the resident memory is that of living tensors. By default, freed buffers below 32 MiB are kept.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, resource.getpagesize())


def case(layout: Layout, accumulation: int = 1, settings: Sequence[str] = ()) -> tuple[int, list[str]]:
    """(number of ranks, all settings) of the quick start's model in a layout, with 8 sequences of 256 tokens per step.

    settings: replace those of this function.
    """
    ranks, own = LAYOUTS[layout]
    rows, rest = divmod(8, accumulation * (ranks if layout.startswith("dp_") else 1))
    if rest:
        raise UsageError(f"accumulation {accumulation} does not divide the 8 sequences of a step of {layout}")
    batch = (f"training.local_batch_size={rows}", "training.global_batch_size=8", "training.seq_len=256")
    return ranks, ["model.vocab_size=4096", *batch, *own, *settings]


def configuration(
    settings: Sequence[str], world_size: int, device_type: str = "cpu", *, checks_files: bool = True
) -> JobConfig:
    """The configuration with `settings`, each "section.key=value"; the last one of a key counts."""
    values = dict(setting.split("=", 1) for setting in settings)
    arguments = [f"--{key}={value}" for key, value in values.items()]
    return load_config(arguments, world_size=world_size, device_type=device_type, checks_files=checks_files)


def build(config: JobConfig, device: torch.device = CPU) -> tuple[Trainer, list[Batch]]:
    """The trainer of this rank, and the microbatches of a step on random tokens. Both are on the device."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = Mesh(config.parallelism, World(rank, rank, size, device.type))
    mesh.connect(config.comm)
    trainer = build_trainer(job_of(config, mesh.world.size), build_model(config, mesh, device), mesh, device)
    step = job_of(config, mesh.world.size).step
    rows, count = step.rows_per_batch, step.batches
    tokens = torch.randint(
        resolve_model(config.model)[1].vocab_size,
        (count, 2, rows, config.training.seq_len),
        generator=torch.Generator().manual_seed(mesh.data_rank),
    )
    numbers = torch.arange(rows)
    batches = [Batch(inputs, labels, numbers, torch.zeros_like(numbers)) for inputs, labels in tokens]
    return trainer, [on_device(batch, device) for batch in batches]
