"""Check titanlite on a GPU and measure its speed there: one command, at most 9 minutes.

    python scripts/gpu_check.py --out DIR [--only PART,...] [--tiny] [--device cpu]

Prints a row per case as it ends, and a page of the promises that they confirm, with the file to look at if one fails.
DIR/gpu_check.md has the page and all rows; DIR/gpu_check.jsonl gets each row as it ends. docs/performance.md describes
the checks. Each runs in processes of its own with a time limit. Exit code 0 if no case failed, else 1.

On a machine without a package index: python scripts/gpu_packages.py --help
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed

import gpu_packages

if __name__ == "__main__":
    gpu_packages.use()

import torch
from gpu_checks import attention, benchmark, facts, hangs, kernels, layouts, profiling, rates, saves, steps, syncs
from gpu_checks import training as training_checks
from gpu_checks.processes import Call, Send, run_calls
from gpu_checks.report import Report
from gpu_checks.rows import Row
from gpu_checks.workload import Setup

from titanlite.runtime.gpus import set_allocator

TIME_LIMIT_S = 525.0
"""Of all parts. What still runs by then is stopped. Imports and the page take some seconds more."""
PATIENCE_ON_CPU = 4.0
"""Factor of all time limits with --device cpu: other programs may keep a CPU busy."""
LEAST_S = 15.0
"""A stage does not begin if less time is left."""
THREADS = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
"""Of each process on a GPU machine: with 16 cores, a dozen of them run at the same time, and half of them compile."""


@dataclass(frozen=True)
class Part:
    """One process. function(emit, setup, *args). ranks: that it starts at the same time, each on a GPU of its own."""

    check: str
    name: str
    function: Callable[..., None]
    args: tuple[Any, ...] = ()
    ranks: int = 1


@dataclass(frozen=True)
class Stage:
    """Parts that run at the same time, and their time limit. Those that measure rates run alone."""

    limit_s: float
    parts: tuple[Part, ...]


LAYOUTS = Stage(200.0, (Part(layouts.CHECK, "two ranks", layouts.check, ranks=2),))
STAGES = (
    Stage(90.0, (Part(facts.CHECK, "facts", facts.check),)),
    Stage(150.0, (Part(benchmark.CHECK, "side by side", benchmark.check_side_by_side),)),
    Stage(75.0, (Part(profiling.CHECK, "profile", profiling.check),)),
    Stage(75.0, (Part(layouts.CHECK, "simulated ranks", layouts.check_simulated),)),
    Stage(
        200.0,
        (
            *(
                Part(attention.CHECK, f"attention {number} of {attention.SHARES}", attention.check, (number,))
                for number in range(1, attention.SHARES + 1)
            ),
            *(Part(steps.CHECK, f"compiled steps of {name}", steps.check_compiled, (name,)) for name in steps.COMPILED),
            Part(training_checks.CHECK, "training", training_checks.check),
            Part(syncs.CHECK, "waits and graphs", syncs.check),
            Part(hangs.CHECK, "hangs", hangs.check),
            Part(kernels.CHECK, "kernels", kernels.check),
            Part(steps.CHECK, "eager steps", steps.check_eager),
            Part(steps.CHECK, "repeated steps", steps.check_repeats),
        ),
    ),
    Stage(75.0, (Part(rates.CHECK, "rates", rates.check),)),
    Stage(100.0, tuple(Part(saves.CHECK, f"checkpoints {mode}", saves.check, (mode,)) for mode in saves.MODES)),
    *(
        Stage(75.0, (Part(benchmark.CHECK, case.name.replace(",", ""), benchmark.check_case, (index,)),))
        for index, case in enumerate(benchmark.CASES)
    ),
)
"""What only a GPU can tell comes first; what is compiled takes longest, so it begins first."""


def run_part(send: Send, function: Callable[..., None], setup: Setup, args: tuple[Any, ...]) -> None:
    """Run a part in this process."""
    function(lambda row: send(asdict(row)), setup, *args)


def environment(setup: Setup) -> dict[str, str]:
    """Environment variables of all processes. The cache of the compiler is empty at first."""
    found = {"TORCHINDUCTOR_CACHE_DIR": str(Path(setup.folder, "inductor"))}
    return found | ({"CUDA_VISIBLE_DEVICES": ""} if setup.device_type == "cpu" else THREADS)


def ordered(device_type: str, gpus: int) -> tuple[Stage, ...]:
    """The stages: with several GPUs, their layouts first."""
    return (LAYOUTS, *STAGES) if device_type == "cuda" and gpus >= 2 else (*STAGES, LAYOUTS)


def chosen(stages: Sequence[Stage], only: str) -> tuple[Stage, ...]:
    """The stages with the parts that `only` names, separated by commas: numbers or names of checks, or names of parts;
    "" for all. Raises ValueError if one is unknown."""
    if not only:
        return tuple(stages)
    wanted = {name.strip() for name in only.split(",") if name.strip()}
    parts = [part for stage in stages for part in stage.parts]
    if unknown := wanted - {name for part in parts for name in names(part)}:
        listed = "; ".join(f"{part.check}: {part.name}" for part in sorted(parts, key=lambda part: _number(part.check)))
        raise ValueError(f"--only: no part {', '.join(map(repr, sorted(unknown)))}; the parts are {listed}")
    kept = (replace(stage, parts=tuple(part for part in stage.parts if wanted & names(part))) for stage in stages)
    return tuple(stage for stage in kept if stage.parts)


def names(part: Part) -> set[str]:
    number, _, name = part.check.partition(" ")
    return {number, name, part.check, part.name}


def _number(check: str) -> int:
    return int(check.partition(" ")[0])


def run_stage(stage: Stage, setup: Setup, deadline: float, report: Report) -> None:
    """Run the parts of a stage; reports their rows, with a failed one for a part that crashes or hangs, and seconds."""
    if deadline - time.monotonic() < LEAST_S:
        skip(stage.parts, "no time is left", report)
        return
    skip([part for part in stage.parts if part.ranks > setup.most_ranks], "needs a GPU for each of its ranks", report)
    parts = [part for part in stage.parts if part.ranks <= setup.most_ranks]
    cpus = os.cpu_count() or 1
    outcomes = run_calls(
        [Call(run_part, (part.function, setup, part.args), environment(setup)) for part in parts],
        setup.device_type,
        stage.limit_s,
        lambda _index, value: report.add(Row(**value)),
        at_once=cpus if setup.device_type == "cpu" else max(1, 3 * cpus // 4),
        deadline=deadline,
    )
    for part, outcome in zip(parts, outcomes, strict=True):
        report.add_part(part.name, outcome.seconds)
        if outcome.failure is not None:
            text = f"stopped after {len(outcome.sent)} rows: {outcome.failure.strip().splitlines()[-1]}"
            report.add(Row(part.check, part.name, "failed", text, {"traceback": outcome.failure}))


def skip(parts: Iterable[Part], reason: str, report: Report) -> None:
    for part in parts:
        report.add(Row(part.check, part.name, "skipped", reason))


def read_arguments() -> tuple[argparse.Namespace, tuple[Stage, ...]]:
    """The options, and the stages that they choose."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the report; created if absent")
    parser.add_argument("--only", default="", metavar="PART,...", help='such as 7,8 or "attention,side by side"')
    parser.add_argument("--tiny", action="store_true", help="small shapes: whether the checks run, not rates")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: what runs there; needs --tiny")
    options = parser.parse_args()
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu needs --tiny: the shapes of an 8B model would take hours")
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    try:
        stages = chosen(ordered(options.device, gpus), options.only)
    except ValueError as error:
        parser.error(str(error))
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; for what runs without one: --tiny --device cpu")
    return options, stages


def main() -> None:
    options, stages = read_arguments()
    start = time.monotonic()
    about = {"device": options.device, "tiny": options.tiny, "torch": torch.__version__, "host": platform.platform()}
    report = Report(Path(options.out).resolve(), about)
    patience = PATIENCE_ON_CPU if options.device == "cpu" else 1.0
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as work:
        setup = Setup(options.device, options.tiny, work)
        if setup.device_type == "cuda":
            set_allocator()  # as the launchers do; the other processes inherit it
            os.environ |= environment(setup)  # new interpreters may need them before they import torch
        for stage in stages:
            patient = replace(stage, limit_s=patience * stage.limit_s)
            run_stage(patient, setup, start + patience * TIME_LIMIT_S, report)
            report.write()
    report.add_facts(seconds=round(time.monotonic() - start, 1))
    print(f"\n{report.write()}\nAll rows: {report.page}")
    sys.exit(report.has_failed)


if __name__ == "__main__":
    main()
