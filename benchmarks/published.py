"""Predictions by data-sheet profiles against the throughput that torchtitan has published. Takes seconds; no GPU.

Figures of github.com/pytorch/torchtitan: benchmarks/llama3_h100_202412_torchtitan.md (8B on 8 and 128, 405B on 512
H100), benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md (8B on 64, 70B on 256), docs/performance.md of 2024 (405B on
128 H100, 8B and 70B on 64 A100). Its H100s have 96 GB of HBM2e at 2.4 TB/s and 500 W; the data sheet's have 700 W. The
dynamic power of a processor grows with the third power of its clock, so the rates of its computation are scaled by
(500 / 700) ^ (1 / 3). Its policy "op" recomputes every second matrix product; titanlite's keeps all, and half of the
products of a forward pass are added. Figures with float8 are compared with predictions for bfloat16, since titanlite
has no float8; no other figures are published for 512 GPUs.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.measuring import Row, report
from titanlite.config.load import load_config
from titanlite.planning.estimate import estimate
from titanlite.planning.hardware.machine import Grid, Profile, load_profile
from titanlite.planning.step_time import predict

POWER = (500 / 700) ** (1 / 3)


@dataclass(frozen=True)
class Published:
    """tokens_per_s: of one rank. layout: degrees of FSDP, tp and pp. rows: per data rank. recompute: layer: of every
    second block. compile: without, with, or with float8 and asynchronous tensor parallelism, too. schedule: of the
    pipeline, of as many microbatches as stages."""

    model: str
    machine: str
    ranks: int
    layout: tuple[int, int, int]
    rows: int
    recompute: str
    compile: Literal["no", "yes", "float8"]
    tokens_per_s: float
    schedule: str = "1F1B"


PUBLISHED = (
    Published("8b", "H100", 8, (8, 1, 1), 2, "op", "no", 5762),
    Published("8b", "H100", 8, (8, 1, 1), 2, "op", "yes", 6667),
    Published("8b", "H100", 128, (128, 1, 1), 2, "op", "no", 5605),
    Published("8b", "H100", 128, (128, 1, 1), 2, "op", "yes", 6514),
    Published("8b", "H100", 64, (8, 8, 1), 12, "op", "yes", 4378),
    Published("70b", "H100", 256, (32, 8, 1), 16, "full", "yes", 597.3),
    Published("405b", "H100", 128, (16, 8, 1), 2, "full", "yes", 109),
    Published("405b", "H100", 512, (8, 8, 8), 32, "full", "float8", 100),
    Published("405b", "H100", 512, (8, 8, 8), 32, "full", "float8", 128, "Interleaved1F1B"),
    Published("8b", "A100", 64, (64, 1, 1), 1, "layer", "yes", 2904),
    Published("8b", "A100", 64, (64, 1, 1), 1, "op", "yes", 2973),
    Published("70b", "A100", 64, (64, 1, 1), 1, "full", "yes", 331),
)


def scaled(grid: Grid, factor: float) -> Grid:
    return Grid(grid.sizes, tuple(factor * value for value in grid.values))


def h100_of_torchtitan() -> Profile:
    """The H100 of those figures."""
    sheet = load_profile("h100")
    return replace(
        sheet,
        memory_gib=94.0,
        matmul={dtype: scaled(grid, POWER) for dtype, grid in sheet.matmul.items()},
        attention={
            dtype: {name: scaled(grid, POWER) for name, grid in of.items()} for dtype, of in sheet.attention.items()
        },
        memory=scaled(sheet.memory, 2.4e12 / 3.35e12),
    )


def predicted(case: Published, profile: Profile) -> float:
    """Tokens per second of one rank."""
    shards, tp, pp = case.layout
    stages = 2 * pp if case.schedule == "Interleaved1F1B" else pp
    settings = {
        "training.local_batch_size": case.rows,
        "training.global_batch_size": case.rows * shards,
        "parallelism.dp_shard": shards,
        "parallelism.tp": tp,
        "parallelism.pp": pp,
        "parallelism.pp_schedule": case.schedule,
        "parallelism.pp_microbatch_size": max(case.rows // stages, 1),
        "parallelism.pp_split": "[]",
        "compile.enable": str(case.compile != "no").lower(),
        "activation_checkpoint.mode": "full" if case.recompute == "full" else "selective",
        "activation_checkpoint.selective_policy": "op" if case.recompute == "op" else "layer",
    }
    arguments = ["--job.config_file", f"llama3_{case.model}", *(f"--{key}={value}" for key, value in settings.items())]
    config = load_config(arguments, world_size=case.ranks, device_type="cuda", checks_files=False)
    time = predict(config, estimate(config, case.ranks, device_type="cuda"), profile)
    # a third of the products belongs to the forward pass
    again = time.parts["products"] / 6 if case.recompute == "op" else 0.0
    return case.rows * shards * config.training.seq_len / case.ranks / (time.total + again)


def main(json: Path | None = None) -> None:
    """json: folder of published.json."""
    profiles = {"H100": h100_of_torchtitan(), "A100": load_profile("a100")}
    rows: list[Row] = []
    for case in PUBLISHED:
        found = predicted(case, profiles[case.machine])
        rows.append(
            {
                "model": case.model.upper(),
                "GPUs": f"{case.ranks} {case.machine}",
                "FSDP x tp x pp": " x ".join(map(str, case.layout)),
                "rows": str(case.rows),
                "recompute": case.recompute,
                "compile": case.compile,
                "schedule": case.schedule if case.layout[2] > 1 else "",
                "published": case.tokens_per_s,
                "predicted": found,
                "error": found / case.tokens_per_s - 1,
            }
        )
    report("published", {"Tokens per second of one GPU": rows}, json, {"error": "+.0%"})
