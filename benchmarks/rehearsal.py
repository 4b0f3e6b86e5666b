"""`titanlite plan --rehearse` of ranks of large runs, beside the plan. Takes 12 minutes; no GPU."""

import json as json_format
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.measuring import Row, report
from titanlite.runtime.memory import GIB

Case = tuple[str, int, tuple[int, ...], tuple[str, ...]]
CASES: dict[str, Case] = {
    "8B": ("llama3_8b", 8, (0,), ("training.global_batch_size=16",)),
    "8B, tp 8 x pp 2": (
        *("llama3_8b", 64, (0, 32)),
        ("parallelism.tp=8", "parallelism.pp=2", "training.global_batch_size=16"),
    ),
    "8B, cp 2": ("llama3_8b", 16, (0,), ("parallelism.cp=2", "training.global_batch_size=16")),
    "8B, Muon, hybrid": (
        *("llama3_8b", 16, (0,)),
        ("optimizer.name=Muon", "parallelism.dp_replicate=2", "training.global_batch_size=32"),
    ),
    "70B": ("llama3_70b", 256, (0,), ("training.global_batch_size=64",)),
    "405B": ("llama3_405b", 4096, (0, 2048, 3840), ("training.global_batch_size=512",)),
    "30B-A3B, ep 8": ("qwen3_30b_a3b", 16, (0,), ("training.global_batch_size=64",)),
    "30B-A3B, ep 8 x cp 2": (
        *("qwen3_30b_a3b", 16, (0,)),
        (
            *("parallelism.cp=2", "activation_checkpoint.mode=selective", "training.local_batch_size=1"),
            "training.global_batch_size=16",
        ),
    ),
    "gemma3 12B, pp 2 x tp 2": (
        *("llama3_8b", 16, (0,)),
        (
            *("model.family=gemma3", "model.flavor=12B", "parallelism.pp=2", "parallelism.tp=2"),
            *("parallelism.pp_schedule=Interleaved1F1B", "training.seq_len=4096", "training.global_batch_size=16"),
        ),
    ),
    "gpt-oss 20B, ep 4 x tp 2": (
        *("qwen3_30b_a3b", 16, (0,)),
        (
            *("model.family=gpt_oss", "model.flavor=20B", "parallelism.ep=4", "parallelism.tp=2"),
            "training.global_batch_size=32",
        ),
    ),
    "DeepSeek-V3 16B-A3B, ep 8 x tp 2": (
        *("qwen3_30b_a3b", 16, (0,)),
        (
            *("model.family=deepseek_v3", "model.flavor=16B-A3B", "parallelism.ep=8", "parallelism.tp=2"),
            "training.global_batch_size=32",
        ),
    ),
}
"""Configuration, number of ranks, the rehearsed ones (of pipelines: first, middle and last; of gemma3's, whose last
chunk of the loss has as few positions as what counts as scalars, the first), and settings that replace
those of the file. The batches are cut: two microbatches per step, four with pp 2, and 16 with pp 16."""


def rehearsed(name: str, rank: int) -> dict[str, Any]:
    """What the command says of a rank of a case, as JSON."""
    file, ranks, _, settings = CASES[name]
    options = [
        "--world-size",
        str(ranks),
        "--rehearse",
        "--rank",
        str(rank),
        "--json",
        *(f"--{one}" for one in settings),
    ]
    command = [sys.executable, "-m", "titanlite", "plan", file, *options]
    found: dict[str, Any] = json_format.loads(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)
    return found


def main(cases: tuple[str, ...] = tuple(CASES), json: Path | None = None) -> None:
    """json: folder of rehearsal.json."""
    rows: list[Row] = []
    gaps: dict[str, str] = {}
    for name in cases:
        _, ranks, chosen, _ = CASES[name]
        for rank in chosen:
            begin = perf_counter()
            answer = rehearsed(name, rank)
            found, gaps = answer["stages"]["1"][str(rank)], answer["gaps"]
            ratio = found["peak_bytes"] / found["planned_peak_bytes"]
            rows.append(
                {
                    "case": name,
                    "ranks": ranks,
                    "rank": rank,
                    "collectives": sum(each["calls"] for each in found["collectives"]),
                    "GiB of them": sum(each["bytes"] for each in found["collectives"]) / GIB,
                    "problems": "; ".join(answer["problems"]) or "none",
                    "host reads": ", ".join(f"{key} {count}" for key, count in found["host_reads"].items()) or "none",
                    "peak (GiB)": found["peak_bytes"] / GIB,
                    "plan (GiB)": found["planned_peak_bytes"] / GIB,
                    "peak / plan": ratio,
                    "CPU s": found["cpu_s"],
                    "MiB": found["resident_mib"],
                    "seconds": perf_counter() - begin,
                }
            )
            print(f"{name}, rank {rank}: peak / plan {ratio:.2f}", file=sys.stderr, flush=True)
    of_gaps: list[Row] = [{"part": part, "here": text} for part, text in gaps.items()]
    tables = {"One rank of many": rows, "Gaps": of_gaps}
    report("rehearsal", tables, json, {"peak / plan": ".2f", "CPU s": ".0f", "MiB": ".0f", "seconds": ".0f"})
