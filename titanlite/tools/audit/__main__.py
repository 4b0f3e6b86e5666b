"""Command: compute steps of a run again, from one checkpoint to the next, and compare all that was recorded."""

import math
import os
import random
import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from titanlite.checkpoint.compatibility import changed_settings
from titanlite.checkpoint.folder import step_folder
from titanlite.config.fields import keys_that_affect
from titanlite.data.ledger import LEDGER_FOLDER
from titanlite.faults.record import RECORD_FOLDER
from titanlite.metrics.about import read_starts
from titanlite.metrics.config import METRICS_FILE
from titanlite.metrics.jsonl import last_row
from titanlite.runtime.dump_folder import make_dump_folder
from titanlite.runtime.environment import expand_home
from titanlite.runtime.errors import Rules, UsageError, UserError, raise_problems
from titanlite.runtime.settings import setting
from titanlite.runtime.text import counted, duration, visible
from titanlite.storage.address import Place, is_address, place
from titanlite.tools.audit.compare import Side, differences, unlogged
from titanlite.tools.audit.computer import changes, computer_of, this_computer
from titanlite.tools.audit.intervals import (
    CHECKPOINTS,
    Interval,
    command_in,
    config_file,
    intervals_of,
    open_interval,
    recomputation,
)
from titanlite.tools.audit.origin import origin_of
from titanlite.tools.audit.result import AUDIT_FILE, AUDIT_FOLDER, DEVICE, Result, Verdict, add_results, title
from titanlite.tools.audit.rounding import within_rounding
from titanlite.tools.command import (
    AllowImport,
    Count,
    OptionalCount,
    RunFolder,
    print_lines,
    read_options_and_overrides,
    run_command,
)
from titanlite.tools.compare.measure import Trained
from titanlite.tools.compare.repeats import check_overrides
from titanlite.tools.dump_folder import local_dump_folder
from titanlite.tools.outputs import require_new
from titanlite.tools.saved_run import checkpoints_in, name_storage, open_run
from titanlite.tools.stores import apply_storage
from titanlite.tools.sweep.combinations import Run, checked_runs
from titanlite.tools.sweep.command import RunsOptions, write_script
from titanlite.tools.sweep.training import error_in, start_run, wait_for


@dataclass(frozen=True)
class Options(RunsOptions):
    """Compute steps of a run again, from one checkpoint to the next, and compare what comes out.

    titanlite audit outputs/quickstart --intervals 3 --nproc 2

    Compared are the checkpoint at the end, the rows of metrics.jsonl, the records of single steps, and the ledger. With
    training.bit_equal, they are equal bit for bit on each mesh with the same degrees of tp, cp and ep; without it,
    repeats say whether rounding explains the difference. Options --section.key VALUE may change the layout and the
    paths of data. Exit code: 0 if all intervals are reproduced, else 1. See docs/reproducing.md.
    """

    run: RunFolder = setting(is_path=True)
    """dump folder of a run with checkpoints, or the address of a copy in a store"""
    intervals: Count = setting(1, "0 for all", least=0)
    """number of intervals, drawn at random; 0: all"""
    seed: Count = setting(-1, "write the number that an audit printed", least=0, unset=-1)
    """of the draw; default: a new one, which is printed"""
    out: Annotated[str, tyro.conf.arg(metavar="DIR")] = setting("", is_path=True)
    """folder of what is computed, and of audit.json; default: audit in the run's folder"""
    export: Annotated[str, tyro.conf.arg(metavar="DIR")] = setting("", is_path=True)
    """a model folder exported from the run: names the step of its weights, and audits the interval that ends there"""
    repeats: OptionalCount = setting(None, "0: without; 3 is the least", least=0, most=16)
    """trainings of an interval without training.bit_equal, or of another device, if it is not reproduced bit for bit:
    they measure what rounding explains; default: 4, with --results 0"""
    allow_import: AllowImport = False

    @property
    def most_repeats(self) -> int:
        """Of an interval."""
        return (0 if self.results else 4) if self.repeats is None else self.repeats


def main(argv: Sequence[str]) -> None:
    """Train the drawn intervals again, compare them, write audit.json. Raises UserError."""
    options, overrides, problems = read_options_and_overrides(Options, argv, "audit")
    rules = Rules("--", options, [*problems, *check_overrides(overrides)])
    rules.require("repeats", options.repeats not in (1, 2), "0, or from 3 on", "leave it out for 4")
    rules.require("export", not (options.export and options.results), "only without --results", "leave one of them out")
    raise_problems(rules.problems)
    if is_address(options.run) and not options.out:
        raise UsageError(f"{options.run} is in a store: write --out with a local folder")
    if options.write_slurm is not None:
        require_new(options.write_slurm, "--write-slurm")
    apply_storage(overrides)
    where = place(expand_home(options.run))
    out = Path(expand_home(options.out)) if options.out else Path(str(where), AUDIT_FOLDER)
    _require_no_links(out, is_chosen=bool(options.out))
    seed = secrets.randbelow(2**32) if options.seed == -1 else options.seed
    command = _command(options, seed, overrides)
    with local_dump_folder(where, RECORD_FOLDER, LEDGER_FOLDER) as folder:
        checkpoints = checkpoints_in(folder, where, allow_import=options.allow_import)
        every = intervals_of(checkpoints)
        if options.results:
            chosen = [steps for steps in every if config_file(out, steps).is_file()]
            if not chosen:
                raise UserError(f"{out} has no interval of an audit: leave out --results to compute one")
        else:
            drawn = random.Random(seed).sample(every, min(options.intervals or len(every), len(every)))
            if options.export:
                exported = _before_export(Path(expand_home(options.export)), checkpoints, every)
                drawn = [exported, *(each for each in drawn if each != exported)][: len(drawn)]
            chosen = sorted(drawn, key=lambda steps: steps[0])
            print_lines(f"{where}: {len(chosen)} of {counted(len(every), 'interval')}, drawn with --seed {seed}")
        found = {steps: _open(checkpoints, steps, command, allow_import=options.allow_import) for steps in chosen}
        intervals = [each for each in found.values() if isinstance(each, Interval)]
        for each in intervals:
            name_storage(where, each.end.storage)
        runs: Sequence[Run] = []
        if not options.results:
            runs = _prepare(intervals, out, overrides, command, options)
            if options.write_slurm is not None:
                write_script(options.write_slurm, runs, options.processes)
                return
            _announce(intervals, folder, options)
        codes = {run.name: wait_for(start_run(run, options.processes, error_file(out, run.name))) for run in runs}
        results = [
            _compare(each, folder, out, codes.get(each.name, 0), options) if isinstance(each, Interval) else each
            for each in found.values()
        ]
    make_dump_folder(out, "out")
    add_results(out, str(where), results)
    lines = (line for result in results for line in str(result).split("\n"))
    print_lines("", *lines, "", f"Result: {out / AUDIT_FILE}")
    if not all(result.is_reproduced for result in results):
        sys.exit(1)


def _require_no_links(out: Path, *, is_chosen: bool) -> None:
    """Raise UserError if an audit would write through a link, which may have come with the run. is_chosen: whether the
    user has named the folder, which may then be a link itself."""
    for path in (*(() if is_chosen else (out,)), *out.glob("*"), *out.glob("*-repeats/*")):
        if path.is_symlink():
            raise UserError(
                f"{path} is a link to {os.readlink(path)!r}, through which an audit does not write: remove it, or "
                "choose another --out"
            )


def _command(options: Options, seed: int, overrides: Sequence[str]) -> str:
    """The command that computes the same intervals."""
    words = ["--seed", seed, "--intervals", options.intervals, "--nproc", options.processes, *overrides]
    words += ["--export", options.export] * bool(options.export)
    words += ["--repeats", options.repeats] * (options.repeats is not None)
    words += ["--allow-import"] * options.allow_import
    return shlex.join(["titanlite", "audit", options.run, *map(str, words)])


def _before_export(exported: Path, checkpoints: Place, intervals: Sequence[range]) -> range:
    """The interval at whose end a model folder was exported. Raises UserError."""
    step = origin_of(exported, checkpoints)
    print_lines(f"{exported} has the weights of step {step:,}")
    found = [steps for steps in intervals if steps[-1] == step]
    if not found:
        raise UserError(f"step {step:,} is the run's first checkpoint, and the run did not begin at step 0")
    return found[0]


def _open(checkpoints: Place, steps: range, command: str, *, allow_import: bool) -> Interval | Result:
    """The interval; the result if its checkpoints do not allow to compute it."""
    try:
        return open_interval(checkpoints, steps, allow_import=allow_import)
    except UserError as error:
        return Result(steps[0], steps[-1], "failed", (), (str(error),), {}, {}, command, _now())


def _prepare(
    intervals: Sequence[Interval], out: Path, overrides: Sequence[str], command: str, options: Options
) -> list[Run]:
    """The trainings of the intervals. Raises UserError if one was computed before, ConfigError."""
    if old := [each.name for each in intervals if Path(out, each.name).exists()]:
        raise UserError(
            f"{out} has {', '.join(old)} of an earlier audit: compare again with --results, remove these folders, or "
            "choose another --out"
        )
    make_dump_folder(out, "out")
    processes, device_type = options.processes, options.device_type
    make = partial(recomputation, processes=processes, device_type=device_type)
    return checked_runs({each.name: partial(make, each, out, overrides, command) for each in intervals})


def _announce(intervals: Sequence[Interval], folder: Path, options: Options) -> None:
    """Print other software and devices than the run's, what will be computed, and how long it takes if this machine's
    devices are those of the run."""
    here, rounded, repeats, processes = this_computer(options.device_type), 0, options.most_repeats, options.processes
    for each in intervals:
        computer = computer_of(each.end, folder, each.steps)
        rounded += not _has_equal_bits(each, computer, here)
        for line in changes(computer, here):
            print_lines(f"{title(each.steps[0], each.steps[-1])}: {line}")
    steps, row = sum(len(each.steps) for each in intervals), last_row(folder / METRICS_FILE)
    size = sum(record.bytes for each in intervals for record in each.end.manifest.files.values())
    time, starts = "", read_starts(folder)
    if starts and isinstance(seconds := row.get("step_time_s"), float):  # the file may have been edited
        ranks = math.prod(starts[-1].mesh.values())
        seconds = seconds * steps * ranks / processes + len(intervals) * row.get("time_s/start", 0.0)
        imports = f"and the imports of {counted(len(intervals), 'training')}"
        time = f", about {duration(seconds)} {imports} on devices like those of the run"
    what = f"{counted(steps, 'step')} on {counted(processes, 'process')}{time}"
    print_lines(f"Computes {what}; writes {size / 2**20:,.0f} MiB")
    if rounded and repeats:
        print_lines(f"{counted(rounded, 'interval')} may round: {repeats} times as much if the bits differ")


def _compare(interval: Interval, run: Path, out: Path, code: int, options: Options) -> Result:
    """The result of an interval that was computed. run: its dump folder. code: exit code of the training."""
    again, saved, steps = out / interval.name, interval.end, interval.steps
    before, command = computer_of(saved, run, steps), command_in(config_file(out, steps))
    try:
        message = error_in(error_file(out, interval.name))
        if code or message:
            reason = message or f"the training of these steps failed with exit code {code}: its error is above"
            raise UserError(*reason.split("\n"))
        recomputed = open_run(step_folder(again / CHECKPOINTS, steps[-1]), allow_import=options.allow_import)
    except UserError as error:
        return Result(steps[0], steps[-1], "failed", (), (str(error),), before, {}, command, _now())
    sides = Side(run, saved, options.allow_import), Side(again, recomputed, options.allow_import)
    after = computer_of(recomputed, again, steps)
    lines = list(differences(*sides, steps))
    verdict: Verdict = "differs" if lines else "reproduced"
    if lines and options.most_repeats and not _has_equal_bits(interval, before, after):
        verdict, line = _set_against_rounding(sides, steps, out, options)
        lines = [*dict.fromkeys([line, *lines])] if verdict == "differs" else [line]
    if verdict == "differs":
        lines += _explanations(interval)
    notes = (*changes(before, after), *unlogged(*sides, steps))
    shown = tuple(map(visible, notes)), tuple(map(visible, lines))
    return Result(steps[0], steps[-1], verdict, *shown, before, after, command, _now())


def _has_equal_bits(interval: Interval, before: Mapping[str, str], after: Mapping[str, str]) -> bool:
    """Whether no difference is due to rounding."""
    is_same = all(before.get(name) == after.get(name) for name in (DEVICE, "torch"))
    return interval.end.config.training.bit_equal and is_same


def _set_against_rounding(sides: tuple[Side, Side], steps: range, out: Path, options: Options) -> tuple[Verdict, str]:
    """The verdict on an interval that is not reproduced bit for bit, and its first line."""
    if found := next(differences(*sides, steps, rounds=True), None):
        return "differs", found
    trained = [Trained(side.folder, side.end.path.parent) for side in sides]
    try:
        return within_rounding(
            trained, steps, out, options.most_repeats, options, start_run, allow_import=options.allow_import
        )
    except UserError as error:
        return "differs", f"rounding was not measured: {error}"


def _explanations(interval: Interval) -> Iterator[str]:
    """What beside a false record may explain that an interval is not reproduced."""
    if interval.start is not None:
        earlier, later = interval.start.manifest.config, interval.end.manifest.config
        for line in changed_settings(earlier, later, keys_that_affect("numbers")):
            yield f"the run was resumed between these steps with another setting: {line}"
    if not interval.end.config.training.bit_equal:
        yield "the run was without training.bit_equal: rounding differs between meshes and devices, see --repeats"


def error_file(out: Path, name: str) -> Path:
    """The message of the training of an interval of this name, if it failed."""
    return out / f"{name}.error.json"


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


if __name__ == "__main__":
    run_command(main)
