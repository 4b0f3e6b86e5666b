"""Command: train the runs of a ladder, fit a scaling law to their losses, and predict that of a larger run."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from titanlite.assembly.summary import titanlite
from titanlite.config.files import CONFIG_FILE
from titanlite.runtime.settings import setting
from titanlite.runtime.text import counted
from titanlite.tools.command import print_lines, run_command, write_json
from titanlite.tools.ladder.prediction import LADDER_FILE, lines_of, predict, require_enough
from titanlite.tools.ladder.rungs import Ladder, read_ladder
from titanlite.tools.sweep.command import RunsOptions, carry_out, raise_failed, read_runs_options
from titanlite.tools.sweep.training import final_loss, report_line, table


@dataclass(frozen=True)
class Options(RunsOptions):
    """Train the runs of a ladder of sizes, fit L = E + A / N^alpha + B / D^beta to their validation losses, and predict
    the loss of a larger run before it starts.

    LADDER is a TOML file with a configuration, tables [[rungs]] and a table [target]: see docs/ladder.md. All runs are
    checked before the first one starts. The same command again skips the finished runs, resumes interrupted ones if
    checkpoint.enable is true, and starts the others.
    """

    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="LADDER")] = setting(is_path=True)
    """TOML file of the ladder; --section.key VALUE overrides a key of all runs"""


def main(argv: Sequence[str]) -> None:
    """Check the runs, train them, and print the prediction. Raises UserError."""
    options, overrides = read_runs_options(Options, argv, "ladder")
    ladder = read_ladder(options.file, overrides, world_size=options.processes, device_type=options.device_type)
    require_enough(ladder.rungs)
    runs = [rung.run for rung in ladder.rungs]
    codes = carry_out(options, runs)
    if codes is None:
        return
    print_lines("", *table(runs, codes), "")
    raise_failed(runs, codes)
    print_lines(*_prediction(ladder))


def _prediction(ladder: Ladder) -> list[str]:
    """The lines of the prediction, which is also written to the folder of the ladder."""
    losses = [final_loss(rung.run) for rung in ladder.rungs]
    known = [loss for loss in losses if loss is not None]
    if missing := len(losses) - len(known):
        return [f"No prediction yet: {counted(missing, 'run')} of {len(losses)} without a last validation"]
    found, run = predict(ladder, known), ladder.target.run
    folder = run.folder.parent
    write_json(folder / LADDER_FILE, found)
    lines = lines_of(ladder, found)
    if final_loss(run) is None:
        config, *others = run.arguments
        words = shlex.join([config.removeprefix(f"--{CONFIG_FILE}="), *others])
        lines.append(f"  train it: {titanlite()} train {words}")
    return [*lines, "", report_line(folder, folder=folder)]


if __name__ == "__main__":
    run_command(main)
