"""Memory and speed of long sequences: context parallelism beside sharded and tensor parallelism.

A model of 2 layers, width 256, heads of 64 and a vocabulary of 1,024, on random tokens without documents. Every
measurement runs in new processes, as in the benchmark "memory". The first table has one row of `seq_len` tokens: the
peak of the memory in a step over that before it, of the rank with the highest one. The second table has two rows of
each of `speed_seq_lens`, on two ranks.

On CPUs, all layouts use all cores, and the peak is that of the resident memory if freed memory is given back at once.
With --device cuda each rank has a GPU, and layouts with more ranks than GPUs are left out.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from benchmarks.measuring import (
    MIB,
    Row,
    build,
    configuration,
    give_memory_back,
    peak_bytes,
    ratios,
    report,
    reset_peak,
    threads_per_process,
    use_device,
    wait_for_all,
)
from benchmarks.memory import measure_all
from titanlite.planning.estimate import estimate
from titanlite.ranks.launch import run_ranks
from titanlite.runtime.errors import UsageError

MODEL = (
    *("model.n_layers=2", "model.dim=256", "model.n_heads=4", "model.n_kv_heads=4", "model.ffn_dim=768"),
    "model.vocab_size=1024",
)
LAYOUTS = {
    "cp 1": (1, ()),
    "cp 2": (2, ("parallelism.cp=2",)),
    "cp 2, gather": (2, ("parallelism.cp=2", "parallelism.context_parallel=gather")),
    "cp 4": (4, ("parallelism.cp=4",)),
    "tp 2": (2, ("parallelism.tp=2",)),
    "dp_shard 2": (2, ("parallelism.dp_shard=2",)),
}
"""Layout -> number of ranks, settings."""
MEMORY_LAYOUTS = ("cp 1", "cp 2", "cp 2, gather", "cp 4", "tp 2")


def case(layout: str, rows: int, seq_len: int, settings: tuple[str, ...]) -> tuple[int, list[str]]:
    """(number of ranks, all settings) of a layout, with so many rows per step."""
    ranks, own = LAYOUTS[layout]
    local = rows // (ranks if layout.startswith("dp_") else 1)
    batch = (f"training.local_batch_size={local}", f"training.global_batch_size={rows}", f"training.seq_len={seq_len}")
    return ranks, [*MODEL, *batch, *own, *settings]


def measured_peak(settings: Sequence[str], threads: int, device_type: str) -> int:
    """Peak bytes of the second step on this rank, over parameters, optimizer state and buffers."""
    give_memory_back()
    torch.set_num_threads(threads)
    device = use_device(device_type)
    trainer, batches = build(configuration(settings, dist.get_world_size(), device_type), device)
    trainer.train_step(batches)
    trainer.optimizer.zero_grad()
    wait_for_all(device)
    before = reset_peak(device)
    trainer.train_step(batches)
    wait_for_all(device)
    return peak_bytes(device) - before


def peaks(layout: str, seq_len: int, settings: tuple[str, ...], device_type: str = "cpu") -> tuple[float, float]:
    """(measured, planned) of the rank that needs most, in MiB"""
    ranks, chosen = case(layout, 1, seq_len, settings)
    found = run_ranks(measured_peak, ranks, chosen, threads_per_process(ranks), device_type, timeout_s=3600)
    plan = estimate(configuration(chosen, ranks, device_type), ranks, device_type=device_type).largest.memory
    return max(found) / MIB, (plan.total - plan.parameters - plan.optimizer - plan.buffers) / MIB


def main(
    seq_len: int = 32_768,
    speed_seq_lens: tuple[int, ...] = (2048, 8192),
    rounds: int = 3,
    steps: int = 2,
    settings: tuple[str, ...] = (),
    device: Literal["cpu", "cuda"] = "cpu",
    json: Path | None = None,
) -> None:
    """settings: of the configuration, such as model.n_layers=1. json: folder of context.json."""
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus < 2:
        raise UsageError(f"--device cuda needs two GPUs, and this machine has {gpus}: leave it out to measure on CPUs")
    layouts = [name for name in MEMORY_LAYOUTS if device == "cpu" or LAYOUTS[name][0] <= gpus]
    memory = {layout: peaks(layout, seq_len, settings, device) for layout in layouts}
    first: list[Row] = [
        {"layout": layout, "peak (MiB)": peak, "cp 1 / this": memory["cp 1"][0] / peak, "plan (MiB)": plan}
        for layout, (peak, plan) in memory.items()
    ]
    on_two_ranks = ("dp_shard 2", "cp 2", "cp 2, gather", "tp 2")
    speed = measure_all(
        {(length, layout): case(layout, 2, length, settings) for length in speed_seq_lens for layout in on_two_ranks},
        rounds,
        steps,
        device,
    )
    second: list[Row] = [
        {
            "sequence": length,
            "layout": layout,
            "tokens/s": found["tokens/s"],
            "relative to dp_shard 2": ratios(found["tokens/s"], speed[length, "dp_shard 2"]["tokens/s"]),
        }
        for (length, layout), found in speed.items()
    ]
    title = f"Peak memory of a rank in a step on one row of {seq_len:,} tokens"
    report("context", {title: first, "Speed of two rows on two ranks": second}, json)
