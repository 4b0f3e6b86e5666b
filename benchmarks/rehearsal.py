"""The plan against the real program of any rank of thousands, on fake tensors. Takes 12 minutes; no GPU.

Each case builds one rank by titanlite's own code, on tensors without data and with torch's process group that sends
nothing, and runs two optimizer steps with few microbatches. The second one is compared with `titanlite plan`: calls and
bytes of each collective, except for all-reduces of scalars, and the peak of the living storages. The second table lists
what is not the program of a GPU.
"""

import sys
from pathlib import Path
from time import perf_counter

from benchmarks.measuring import Row, configuration, report
from titanlite.runtime.memory import GIB
from titanlite.tools.plan.rehearsal.rank import rehearse
from titanlite.tools.plan.rehearsal.report import GAPS

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


def main(cases: tuple[str, ...] = tuple(CASES), json: Path | None = None) -> None:
    """json: folder of rehearsal.json."""
    rows: list[Row] = []
    for name in cases:
        file, ranks, chosen, settings = CASES[name]
        config = configuration([f"job.config_file={file}", *settings], ranks, "cuda", checks_files=False)
        for rank in chosen:
            begin = perf_counter()
            found = rehearse(config, ranks, rank)
            assert found.plan is not None
            calls = sum(calls for calls, _ in found.collectives.values())
            rows.append(
                {
                    "case": name,
                    "ranks": ranks,
                    "rank": rank,
                    "collectives": calls,
                    "GiB of them": sum(size for _, size in found.collectives.values()) / GIB,
                    "differences": "; ".join(found.differences) or "none",
                    "host reads": ", ".join(f"{key} {count}" for key, count in found.host_reads.items()) or "none",
                    "peak (GiB)": found.peak / GIB,
                    "plan (GiB)": found.plan.memory.total / GIB,
                    "peak / plan": found.ratio,
                    "seconds": perf_counter() - begin,
                }
            )
            print(f"{name}, rank {rank}: peak / plan {found.ratio:.2f}", file=sys.stderr, flush=True)
    gaps: list[Row] = [{"part": part, "here": text} for part, text in GAPS.items()]
    report("rehearsal", {"One rank of many": rows, "Gaps": gaps}, json, {"peak / plan": ".2f", "seconds": ".0f"})
