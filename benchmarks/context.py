"""Memory and speed of long sequences: context parallelism beside sharded and tensor parallelism.

A model of 2 layers, width 256, heads of 64 and a vocabulary of 1,024, on random tokens without documents. Every
measurement runs in new processes, as in the benchmark "memory"; all layouts use all cores. The first table has one row
of `seq_len` tokens: the peak of the resident memory in a step over that before it, of the rank with the highest one, if
freed memory is given back at once. The second table has two rows of each of `speed_seq_lens`, on two ranks.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.measuring import (
    CPU,
    MIB,
    Row,
    build,
    configuration,
    give_memory_back,
    ratios,
    report,
    reset_peak,
    threads_per_process,
)
from benchmarks.memory import measure_all
from titanlite.planning.estimate import estimate
from titanlite.runtime.launch import run_ranks
from titanlite.runtime.memory import peak_memory_bytes

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


def case(layout: str, rows: int, seq_len: int, settings: tuple[str, ...]) -> tuple[int, list[str]]:
    """(number of ranks, all settings) of a layout, with so many rows per step."""
    ranks, own = LAYOUTS[layout]
    local = rows // (ranks if layout.startswith("dp_") else 1)
    batch = (f"training.local_batch_size={local}", f"training.global_batch_size={rows}", f"training.seq_len={seq_len}")
    return ranks, [*MODEL, *batch, *own, *settings]


def measured_peak(settings: Sequence[str], threads: int) -> int:
    """Peak bytes of the second step on this rank, over parameters, optimizer state and buffers."""
    give_memory_back()
    torch.set_num_threads(threads)
    trainer, batches = build(configuration(settings, dist.get_world_size()))
    trainer.train_step(batches)
    trainer.optimizer.zero_grad()
    before = reset_peak()
    trainer.train_step(batches)
    return peak_memory_bytes(CPU) - before


def peaks(layout: str, seq_len: int, settings: tuple[str, ...]) -> tuple[float, float]:
    """(measured, planned) of the rank that needs most, in MiB"""
    ranks, chosen = case(layout, 1, seq_len, settings)
    found = run_ranks(measured_peak, ranks, chosen, threads_per_process(ranks), timeout_s=3600)
    plan = estimate(configuration(chosen, ranks), ranks, device_type="cpu").largest.memory
    return max(found) / MIB, (plan.total - plan.parameters - plan.optimizer - plan.buffers) / MIB


def main(
    seq_len: int = 32_768,
    speed_seq_lens: tuple[int, ...] = (2048, 8192),
    rounds: int = 3,
    steps: int = 2,
    settings: tuple[str, ...] = (),
    json: Path | None = None,
) -> None:
    """settings: of the configuration, such as model.n_layers=1. json: folder of context.json."""
    layouts = ("cp 1", "cp 2", "cp 2, gather", "cp 4", "tp 2")
    memory = {layout: peaks(layout, seq_len, settings) for layout in layouts}
    first: list[Row] = [
        {"layout": layout, "peak (MiB)": peak, "cp 1 / this": memory["cp 1"][0] / peak, "plan (MiB)": plan}
        for layout, (peak, plan) in memory.items()
    ]
    on_two_ranks = ("dp_shard 2", "cp 2", "cp 2, gather", "tp 2")
    speed = measure_all(
        {(length, layout): case(layout, 2, length, settings) for length in speed_seq_lens for layout in on_two_ranks},
        rounds,
        steps,
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
    forms = {
        "sequence": ",",
        **dict.fromkeys(("peak (MiB)", "plan (MiB)", "tokens/s"), ",.0f"),
        **dict.fromkeys(("cp 1 / this", "relative to dp_shard 2"), ".2f"),
    }
    title = f"Peak memory of a rank in a step on one row of {seq_len:,} tokens"
    report("context", {title: first, "Speed of two rows on two ranks": second}, forms, json)
