"""Peak memory of training by layout, vocabulary and sequence length, against the estimate of `titanlite plan`.

Every measurement runs in new processes: the quick start's model on random tokens, 8 sequences per step. The peak is
that of the resident memory over the memory before the model is built, of the rank with the highest one; the plan is
that of the rank which needs most. Resident memory also has what the plan leaves out: code that the first step loads,
buffers of collectives, and freed memory that the allocator keeps.

The second table shows how speed and memory grow with layers, width, sequence length, vocabulary and ranks. From the
quick start's model (6 layers, width 256, sequences of 256 tokens, vocabulary 4,096) one size changes at a time; a step
always has 2,048 tokens. Two ranks share them (dp_shard). `python -m scripts.pictures growth FOLDER` draws it.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from benchmarks.measuring import (
    MIB,
    Layout,
    Row,
    build,
    case,
    configuration,
    peak_bytes,
    report,
    reset_peak,
    threads_per_process,
    use_device,
    wait_for_all,
)
from titanlite.planning.estimate import estimate
from titanlite.ranks.launch import run_ranks

Axis = Literal["layers", "width", "sequence", "vocabulary", "ranks"]
TOKENS = 2048
SIZES: dict[Axis, dict[int, tuple[str, ...]]] = {
    "layers": {size: (f"model.n_layers={size}",) for size in (2, 6, 12, 24)},
    "width": {
        size: (
            f"model.dim={size}",
            f"model.ffn_dim={3 * size}",
            *(f"model.{key}={size // 16}" for key in ("n_heads", "n_kv_heads")),
        )
        for size in (128, 256, 512)
    },
    "sequence": {
        size: (
            f"training.seq_len={size}",
            *(f"training.{key}_batch_size={TOKENS // size}" for key in ("local", "global")),
        )
        for size in (128, 256, 512, 1024)
    },
    "vocabulary": {size: (f"model.vocab_size={size}",) for size in (4096, 16_384, 65_536)},
    "ranks": {1: (), 2: ()},
}
"""Axis -> size -> its settings."""


def measure(settings: Sequence[str], steps: int, threads: int, device_type: str) -> tuple[float, float]:
    """(tokens per second of all ranks, after two steps of warm-up; peak of this rank in MiB)"""
    torch.set_num_threads(threads)
    device = use_device(device_type)
    config = configuration(settings, dist.get_world_size(), device_type)
    start = reset_peak(device)
    trainer, batches = build(config, device)
    for _ in range(2):
        trainer.train_step(batches)
    wait_for_all(device)
    begin = perf_counter()
    for _ in range(steps):
        trainer.train_step(batches)
    wait_for_all(device)
    tokens = steps * config.training.global_batch_size * config.training.seq_len
    return tokens / (perf_counter() - begin), (peak_bytes(device) - start) / MIB


def measure_all(
    cases: Mapping[Any, tuple[int, Sequence[str]]], rounds: int, steps: int, device_type: str = "cpu"
) -> dict[Any, dict[str, Any]]:
    """By case, which is (number of ranks, settings): speed and peak of each round, and the plan."""
    found: dict[Any, dict[str, Any]] = {}
    for name, (ranks, settings) in cases.items():
        config = configuration(settings, ranks, device_type)
        plan = estimate(config, ranks, device_type=device_type).largest.memory.total
        found[name] = {"tokens/s": [], "peak (MiB)": [], "plan (MiB)": plan / MIB}
    for _ in range(rounds):
        for name, (ranks, settings) in cases.items():
            arguments = (settings, steps, threads_per_process(ranks), device_type)
            measured = run_ranks(measure, ranks, *arguments, timeout_s=3600)
            speeds, peaks = zip(*measured, strict=True)
            found[name]["tokens/s"].append(speeds[0])
            found[name]["peak (MiB)"].append(max(peaks))
    return found


def main(
    layouts: tuple[Layout, ...] = get_args(Layout),
    vocab_sizes: tuple[int, ...] = (4096, 32_768),
    seq_lens: tuple[int, ...] = (256, 1024),
    axes: tuple[Axis, ...] = get_args(Axis),
    rounds: int = 3,
    steps: int = 4,
    settings: tuple[str, ...] = (),
    json: Path | None = None,
) -> None:
    """axes, steps: of the second table. settings: of the model, such as model.n_layers=2. json: folder of
    memory.json."""
    cases = {
        (layout, vocab_size, seq_len): case(
            layout, 1, (f"model.vocab_size={vocab_size}", f"training.seq_len={seq_len}", *settings)
        )
        for layout, vocab_size, seq_len in product(layouts, vocab_sizes, seq_lens)
    }
    rows: list[Row] = []
    for (layout, vocab_size, seq_len), found in measure_all(cases, rounds, steps=1).items():
        labels = {"layout": layout, "vocabulary": vocab_size, "sequence": seq_len}
        peaks, plan = found["peak (MiB)"], found["plan (MiB)"]
        rows.append({**labels, "peak (MiB)": peaks, "plan (MiB)": plan, "plan / peak": [plan / peak for peak in peaks]})
    growing = {}
    for axis in axes:
        for size, own in SIZES[axis].items():
            shared: Layout = "dp_shard" if (axis, size) == ("ranks", 2) else "single"
            growing[axis, size] = case(shared, 1, (*settings, *own))
    measured = measure_all(growing, rounds, steps).items()
    growth: list[Row] = [{"axis": axis, "size": size, **found} for (axis, size), found in measured]
    tables = {"Peak memory of training": rows, "Growth": growth}
    report("memory", {title: table for title, table in tables.items() if table}, json)
