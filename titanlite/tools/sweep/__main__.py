"""Command: train all combinations of some values of a configuration, or write them as a Slurm array."""

from collections.abc import Sequence
from dataclasses import dataclass

from titanlite.tools.command import ConfigFile, print_lines, run_command
from titanlite.tools.sweep.combinations import combinations
from titanlite.tools.sweep.command import RunsOptions, carry_out, raise_failed, read_runs_options
from titanlite.tools.sweep.training import results


@dataclass(frozen=True)
class Options(RunsOptions):
    """Train all combinations of the values of CONFIG's keys, one after the other, then compare them in a table.

    titanlite sweep my.toml --optimizer.lr 1e-3,3e-4 --training.seq_len 512,1024 --training.steps 200

    Commas separate values; an array is one value: --optimizer.weight_decay_skip '[],["*norm*"]'. Quote a text that has
    a comma: '"a, b",c'. Each run is in a folder below job.dump_folder, named by its values. All runs are checked before
    the first one starts. The same command again skips the finished runs, resumes interrupted ones if checkpoint.enable
    is true, and starts the others.
    """

    config: ConfigFile
    """TOML file, or name of a shipped configuration; --section.key VALUE[,VALUE ...] overrides its keys"""


def main(argv: Sequence[str]) -> None:
    """Check the runs, then train them, write the script or print the table. Raises UserError."""
    options, overrides = read_runs_options(Options, argv, "sweep")
    runs = combinations(options.config, overrides, world_size=options.processes, device_type=options.device_type)
    codes = carry_out(options, runs)
    if codes is not None:
        print_lines("", *results(runs, codes))
        raise_failed(runs, codes)


if __name__ == "__main__":
    run_command(main)
