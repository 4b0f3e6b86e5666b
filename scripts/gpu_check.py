"""Check titanlite on a GPU and measure its speed there: one command, less than 6 minutes.

    python scripts/gpu_check.py --out DIR [--tiny] [--device cpu]

Prints a row per case as it ends, and a page of the promises that they confirm, with the file to look at if one fails.
DIR/gpu_check.md has the page and all rows, DIR/gpu_check.json the rows. docs/performance.md describes the checks. Each
runs in processes of its own with a time limit. Exit code 0 if no case failed, else 1.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed

import torch
from gpu_checks import benchmark, facts, kernels, layouts, profiling, saves, steps, syncs
from gpu_checks.processes import Call, Send, run_calls
from gpu_checks.rows import Row, markdown, page
from gpu_checks.workload import Setup

from titanlite.runtime.gpus import set_allocator

TIME_LIMIT_S = 345.0
"""Of the entire program. What still runs by then is stopped."""
PATIENCE_ON_CPU = 4.0
"""Factor of all time limits with --device cpu: other programs may keep a CPU busy."""
LEAST_S = 15.0
"""A stage does not begin if less time is left."""


@dataclass(frozen=True)
class Part:
    """One process. function(emit, setup, *args)"""

    check: str
    name: str
    function: Callable[..., None]
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Stage:
    """Parts that run at the same time, and their time limit. Those that measure rates run alone."""

    limit_s: float
    parts: tuple[Part, ...]


STAGES = (
    Stage(90.0, (Part(facts.CHECK, "facts", facts.check),)),
    Stage(
        270.0,
        (
            Part(kernels.CHECK, "kernels", kernels.check),
            Part(steps.CHECK, "eager steps", steps.check_eager),
            *(Part(steps.CHECK, f"compiled steps, {name}", steps.check_compiled, (name,)) for name in steps.FAMILIES),
            Part(steps.CHECK, "repeated steps", steps.check_repeats),
            Part(syncs.CHECK, "waits and graphs", syncs.check),
            Part(saves.CHECK, "checkpoints", saves.check),
            Part(layouts.CHECK, "two ranks", layouts.check),
        ),
    ),
    Stage(120.0, (Part(benchmark.CHECK, "side by side", benchmark.check_side_by_side),)),
    Stage(60.0, (Part(profiling.CHECK, "profile", profiling.check),)),
    Stage(90.0, (Part(layouts.CHECK, "simulated ranks", layouts.check_simulated),)),
    *(
        Stage(75.0, (Part(benchmark.CHECK, case.name, benchmark.check_case, (index,)),))
        for index, case in enumerate(benchmark.CASES)
    ),
)


def run_part(send: Send, function: Callable[..., None], setup: Setup, args: tuple[Any, ...]) -> None:
    """Run a part in this process."""
    function(lambda row: send(asdict(row)), setup, *args)


def environment(setup: Setup) -> dict[str, str]:
    """Environment variables of all processes. The cache of the compiler is empty at first."""
    found = {"TORCHINDUCTOR_CACHE_DIR": str(Path(setup.folder, "inductor"))}
    return found | ({"CUDA_VISIBLE_DEVICES": ""} if setup.device_type == "cpu" else {})


def run_stage(stage: Stage, setup: Setup, deadline: float) -> tuple[list[Row], dict[str, float]]:
    """Run the parts of a stage; returns their rows, with a failed one for a part that crashes or hangs, and seconds."""
    if deadline - time.monotonic() < LEAST_S:
        return [show(Row(part.check, part.name, "skipped", "no time is left")) for part in stage.parts], {}
    rows: list[Row] = []
    outcomes = run_calls(
        [Call(run_part, (part.function, setup, part.args), environment(setup)) for part in stage.parts],
        setup.device_type,
        stage.limit_s,
        lambda _index, value: rows.append(show(Row(**value))),
        at_once=os.cpu_count() or 1,
        deadline=deadline,
    )
    for part, outcome in zip(stage.parts, outcomes, strict=True):
        if outcome.failure is not None:
            text = f"stopped after {len(outcome.sent)} rows: {outcome.failure.strip().splitlines()[-1]}"
            rows.append(show(Row(part.check, part.name, "failed", text, {"traceback": outcome.failure})))
    return rows, {part.name: outcome.seconds for part, outcome in zip(stage.parts, outcomes, strict=True)}


def show(row: Row) -> Row:
    print(f"{row.status:<9} {row.check}: {row.name}: {row.text}", flush=True)
    return row


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the report; created if absent")
    parser.add_argument("--tiny", action="store_true", help="small shapes: whether the checks run, not rates")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: what runs there; needs --tiny")
    options = parser.parse_args()
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu needs --tiny: the shapes of an 8B model would take hours")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; for what runs without one: --tiny --device cpu")
    return options


def main() -> None:
    options = read_arguments()
    start = time.monotonic()
    folder = Path(options.out).resolve()
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    setup = Setup(options.device, options.tiny, str(work))
    if setup.device_type == "cuda":
        set_allocator()  # as the launchers do; the other processes inherit it
        os.environ |= environment(setup)  # new interpreters may need them before they import torch
    rows: list[Row] = []
    part_seconds: dict[str, float] = {}
    patience = PATIENCE_ON_CPU if setup.device_type == "cpu" else 1.0
    for stage in STAGES:
        patient = replace(stage, limit_s=patience * stage.limit_s)
        stage_rows, seconds_of_stage = run_stage(patient, setup, start + patience * TIME_LIMIT_S)
        rows += stage_rows
        part_seconds |= seconds_of_stage
    seconds = time.monotonic() - start
    about = {"device": options.device, "tiny": options.tiny, "torch": torch.__version__, "host": platform.platform()}
    about["seconds"] = round(seconds, 1)
    rows.sort(key=lambda row: row.check)
    (folder / "gpu_check.md").write_text(markdown(rows, about))
    (folder / "gpu_check.json").write_text(
        json.dumps({**about, "parts": part_seconds, "rows": [*map(asdict, rows)]}, indent=1)
    )
    shutil.rmtree(work)
    print(f"\n{page(rows, about)}\nAll rows: {folder / 'gpu_check.md'}")
    sys.exit(any(row.status == "failed" for row in rows))


if __name__ == "__main__":
    main()
