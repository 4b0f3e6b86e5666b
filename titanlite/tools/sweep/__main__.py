"""Command: train all combinations of some values of a configuration, or write them as a Slurm array."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch

from titanlite.runtime.errors import UserError, integer_variable, raise_problems
from titanlite.runtime.gpus import usable_gpus
from titanlite.runtime.settings import setting
from titanlite.runtime.text import counted
from titanlite.tools.command import (
    EITHER,
    ConfigFile,
    File,
    OptionalCount,
    new_output,
    read_options_and_overrides,
    require_new,
    run_command,
)
from titanlite.tools.sweep.combinations import combinations, require_same_settings
from titanlite.tools.sweep.slurm import array_script
from titanlite.tools.sweep.training import results, start_run, state_of, train_all

MAX_PROCESSES = 1024


@dataclass(frozen=True)
class Options:
    """Train all combinations of the values of CONFIG's keys, one after the other, then compare them in a table.

    titanlite sweep my.toml --optimizer.lr 1e-3,3e-4 --training.seq_len 512,1024 --training.steps 200

    Commas separate values; an array is one value: --optimizer.weight_decay_skip '[],["*norm*"]'. Quote a text that has
    a comma: '"a, b",c'. Each run is in a folder below job.dump_folder, named by its values. All runs are checked before
    the first one starts. The same command again skips the finished runs, resumes interrupted ones if checkpoint.enable
    is true, and starts the others.
    """

    config: ConfigFile
    """TOML file, or name of a shipped configuration; --section.key VALUE[,VALUE ...] overrides its keys"""
    nproc: OptionalCount = setting(None, "write the number of processes of each run", least=1, most=MAX_PROCESSES)
    """processes of each run on this machine; default: the number of GPUs, else 1; in a Slurm script, GPUs per node"""
    strict: bool = False
    """refuse settings without effect, as titanlite train --strict does"""
    results: Annotated[bool, EITHER] = False
    """print the table of the runs so far, and start nothing"""
    write_slurm: Annotated[File, EITHER] = None
    """write the script of a Slurm array with one run per task to this new file, and start nothing"""


def main(argv: Sequence[str]) -> None:
    """Check the runs, then train them, write the script or print the table. Raises UserError."""
    options, overrides, problems = read_options_and_overrides(Options, argv, "sweep")
    raise_problems(problems)
    if options.write_slurm is not None:
        require_new(options.write_slurm, "--write-slurm")
    processes = options.nproc or processes_of_node()
    is_cuda = torch.cuda.is_available() or options.write_slurm is not None  # which is for another machine
    device_type = "cuda" if is_cuda else "cpu"
    overrides += ["--strict"] if options.strict else []
    runs = combinations(options.config, overrides, world_size=processes, device_type=device_type)
    if options.write_slurm is not None:
        text = array_script(runs, script=str(options.write_slurm), processes=processes)
        with new_output(options.write_slurm) as path:
            path.write_text(text, encoding="utf-8")
        print(f"Script: {options.write_slurm} ({counted(len(runs), 'run')}); see its first lines")
        return
    codes: dict[str, int] = {}
    if not options.results:
        for run in runs:
            if state_of(run) == "finished":
                require_same_settings(run)
        codes = train_all(runs, partial(start_run, processes=processes))
    print("\n".join(["", *results(runs, codes)]))
    if failed := [f"{name} ({code})" for name, code in codes.items() if code]:
        names = ", ".join(failed)
        raise UserError(
            f"{len(failed)} of {counted(len(runs), 'run')} failed: {names}; the same command starts them again"
        )


def processes_of_node() -> int:
    """The number of processes that run_train.sh starts."""
    return integer_variable("NGPU", max(usable_gpus(os.environ.get("DEVICE", "")), 1), least=1, most=MAX_PROCESSES)


if __name__ == "__main__":
    run_command(main)
