"""Command: say whether two runs of one configuration differ by more than rounding explains."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from titanlite.checkpoint.folder import latest_manifest
from titanlite.config.load import CONFIG_COPY
from titanlite.config.schema import JobConfig
from titanlite.metrics.config import METRICS_FILE
from titanlite.metrics.jsonl import last_row
from titanlite.precision import DTYPES
from titanlite.runtime.dump_folder import make_dump_folder
from titanlite.runtime.environment import expand_home
from titanlite.runtime.errors import UsageError, UserError, raise_problems
from titanlite.runtime.settings import setting
from titanlite.runtime.text import aligned, counted, duration
from titanlite.storage.address import Place, place
from titanlite.tools.command import AllowImport, Count, print_lines, read_options_and_overrides, run_command, write_json
from titanlite.tools.compare.envelope import FACTOR, FLOOR_EPS, Compared, compare, first_outside
from titanlite.tools.compare.measure import NUMBERS, Pairs, Trained, common_steps, differences
from titanlite.tools.compare.repeats import check_overrides, repeats_of, setting_differences, train
from titanlite.tools.dump_folder import local_dump_folder
from titanlite.tools.saved_run import checkpoints_in, saved_config
from titanlite.tools.stores import apply_storage
from titanlite.tools.sweep.combinations import Run
from titanlite.tools.sweep.command import MAX_PROCESSES
from titanlite.tools.sweep.training import start_run

COMPARE_FILE = "compare.json"
MAX_ROWS = 12
"""Of the printed table."""
A, B, REPEATS = 0, 1, 2
"""Positions in the compared runs; the repeats are the last ones."""


@dataclass(frozen=True)
class Options:
    """Say whether two runs of one configuration differ by more than rounding explains.

    titanlite compare outputs/one-gpu outputs/mesh --nproc 2 --out outputs/compare

    The runs may have other layouts, devices and versions. The command trains A's configuration several times from its
    start, each time with another rounding, and compares the difference of A and B with those of the repeats, for loss,
    gradient norm, and the weights at common checkpoints. The same command again continues the training; with another B,
    it uses the same repeats. --section.key VALUE gives the paths of A's data on this machine. Exit code: 0 if the
    difference is within, else 1. See docs/reproducing.md.
    """

    runs: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="A B", help_behavior_hint="(required)")
    ] = setting(is_path=True)
    """two dump folders, or addresses of copies in a store"""
    out: Annotated[str, tyro.conf.arg(metavar="DIR")] = setting(is_path=True)
    """folder of the repeats, and of compare.json"""
    repeats: Count = setting(4, "3 is the least", least=3, most=16)
    """number of repeats"""
    steps: Count = setting(-1, "leave it out for all steps", least=1, unset=-1)
    """compare only the first steps, up to this one"""
    nproc: Count = setting(1, "write the number of processes of each repeat", least=1, most=MAX_PROCESSES)
    """processes of each repeat on this machine; an even number gives more ways to round"""
    allow_import: AllowImport = False


def main(argv: Sequence[str]) -> None:
    """Train the repeats, print the table and the verdict, write compare.json. Raises UserError."""
    options, overrides, problems = read_options_and_overrides(Options, argv, "compare")
    raise_problems([*problems, *check_overrides(overrides)])
    if len(options.runs) != 2:
        raise UsageError(f"{counted(len(options.runs), 'run')}: write titanlite compare A B --out DIR")
    apply_storage(overrides)
    a, b = options.runs
    out = Path(expand_home(options.out))
    with ExitStack() as stack:
        sides, configs = [], []
        for text in (a, b):
            where = place(expand_home(text))
            folder = stack.enter_context(local_dump_folder(where))
            checkpoints = checkpoints_in(folder, where, allow_import=options.allow_import)
            configs.append(_config_of(folder, checkpoints, overrides, allow_import=options.allow_import))
            sides.append(Trained(folder, checkpoints))
        if lines := setting_differences(*configs):
            raise UserError(
                "A and B are not runs of one configuration, so that more than rounding drives them apart:",
                *(f"  {line}" for line in lines),
            )
        logged = [step for step in common_steps(*sides) if options.steps == -1 or step <= options.steps]
        if not logged:
            raise UserError(f"{a} and {b} have logged no step in common: set the same metrics.log_freq")
        make_dump_folder(out, "out")
        runs = _trained(configs[0], sides[0], out, logged[-1], options)
        repeats = [Trained(run.folder, run.folder / run.config.checkpoint.folder) for run in runs]
        pairs = differences([*sides, *repeats], logged[-1], allow_import=options.allow_import)
    eps = torch.finfo(DTYPES[configs[0].training.dtype]).eps
    among = [found for (first, _), found in pairs.items() if first >= REPEATS]
    if not any(difference for found in among for by_step in found.values() for difference in by_step.values()):
        raise UserError("all repeats are equal bit for bit, so rounding was not measured: write another --nproc")
    compared = compare(pairs[A, B], among, eps)
    verdict = verdict_of(compared, pairs, len(runs))
    write_json(out / COMPARE_FILE, {
        "a": a, "b": b, "repeats": [dict(run.values) for run in runs], "factor": FACTOR,
        "floor": FLOOR_EPS * eps, "verdict": verdict,
        "compared": json_rows(compared),
    })  # fmt: skip
    print_lines("", *table(compared), "", verdict, f"Result: {out / COMPARE_FILE}")
    if first_outside(compared) is not None:
        sys.exit(1)


def _config_of(folder: Path, checkpoints: Place, overrides: Sequence[str], *, allow_import: bool) -> JobConfig:
    """The configuration in a dump folder, with overrides, and the values of the flavor in the run's checkpoints. Raises
    UserError, ConfigError."""
    if not (folder / CONFIG_COPY).is_file():
        raise UserError(f"{folder} has no {CONFIG_COPY}: pass the dump folder of a run")
    begun = latest_manifest(checkpoints)
    return saved_config(folder / CONFIG_COPY, overrides, folder, allow_import=allow_import, begun=begun)


def _trained(config: JobConfig, a: Trained, out: Path, last: int, options: Options) -> Sequence[Run]:
    """The trained repeats. Raises UserError if one fails, or has other settings than those in its folder."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    runs = repeats_of(config, out, options.repeats, last, options.nproc, device_type)
    seconds = last_row(a.folder / METRICS_FILE).get("step_time_s")
    time = f"; a step of A took {seconds:.2g} s, {counted(last, 'step')} {duration(seconds * last)}" if seconds else ""
    train(runs, last, lambda run: start_run(run, options.nproc), time)
    return runs


def json_rows(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """All differences. JSON has no infinite numbers: the largest one stands for them."""
    largest = sys.float_info.max
    return [
        asdict(each) | {"difference": min(each.difference, largest), "allowed": min(each.allowed, largest)}
        for each in compared
    ]


def verdict_of(compared: Sequence[Compared], pairs: Pairs, repeats: int) -> str:
    """The verdict in a sentence or two. pairs: of A, B and the repeats."""
    first = first_outside(compared)
    if first is None:
        last = compared[-1].step
        if not any(each.difference for each in compared):
            return f"Equal: up to step {last:,}, A and B have the same bits in all numbers that are compared."
        loss = [each for each in compared if each.name == "loss"][-1]
        return (
            f"Within: up to step {last:,}, A and B differ by no more than rounding explains: the last loss by "
            f"{loss.difference:.1e} of {loss.allowed:.1e}."
        )
    sides = {"A": A, "B": B}
    apart = [
        name
        for name, side in sides.items()
        if min(pairs[side, REPEATS + each][first.name][first.step] for each in range(repeats)) > first.allowed
    ]
    which = f" {apart[0]} also differs from all repeats by more, the other one does not." if len(apart) == 1 else ""
    return (
        f"Outside from step {first.step:,} on: {first.name} differs by {first.difference:.1e}, rounding explains "
        f"{first.allowed:.1e}.{which}"
    )


def table(compared: Sequence[Compared]) -> list[str]:
    """A line for some of the steps: the difference of each number, and the one that rounding explains. Of weights, the
    parameter that comes closest to it, or exceeds it by most."""
    steps = sorted({each.step for each in compared})
    first = first_outside(compared)
    stride = -(-len(steps) // MAX_ROWS)
    shown = {*steps[::stride], steps[-1], first.step if first is not None else steps[-1]}
    rows = [["step", *(f"{name} (allowed)" for name in NUMBERS), "weights (allowed)", "parameter"]]
    for step in sorted(shown):
        at_step = {each.name: each for each in compared if each.step == step}
        numbers = [at_step.pop(name, None) for name in NUMBERS]
        weights = max(at_step.values(), key=lambda each: each.difference / each.allowed, default=None)
        rows.append([f"{step:,}", *map(_cell, [*numbers, weights]), weights.name if weights else "-"])
    return aligned(rows)


def _cell(each: Compared | None) -> str:
    return "-" if each is None else f"{each.difference:.1e} ({each.allowed:.1e}){'' if each.is_within else ' !'}"


if __name__ == "__main__":
    run_command(main)
