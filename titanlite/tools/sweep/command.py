"""What the commands that train several runs share: options, processes, and what is done with the runs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import torch

from titanlite.runtime.errors import UserError, integer_variable, raise_problems
from titanlite.runtime.gpus import usable_gpus
from titanlite.runtime.settings import setting
from titanlite.runtime.text import counted
from titanlite.tools.command import EITHER, File, OptionalCount, print_lines, read_options_and_overrides
from titanlite.tools.outputs import new_output, require_new
from titanlite.tools.sweep.combinations import Run, require_same_settings
from titanlite.tools.sweep.slurm import array_script
from titanlite.tools.sweep.training import start_run, state_of, train_all

MAX_PROCESSES = 1024


@dataclass(frozen=True, kw_only=True)
class RunsOptions:
    """Options of a command that trains several runs."""

    nproc: OptionalCount = setting(None, "write the number of processes of each run", least=1, most=MAX_PROCESSES)
    """processes of each run on this machine; default: the number of GPUs, else 1; in a Slurm script, GPUs per node"""
    strict: bool = False
    """refuse settings without effect, as titanlite train --strict does"""
    results: Annotated[bool, EITHER] = False
    """print the table of the runs so far, and start nothing"""
    write_slurm: Annotated[File, EITHER] = None
    """write the script of a Slurm array with one run per task to this new file, and start nothing"""

    @property
    def processes(self) -> int:
        """Of each run."""
        return self.nproc or processes_of_node()

    @property
    def device_type(self) -> str:
        """Of the machine that trains; a Slurm script is for another one."""
        return "cuda" if torch.cuda.is_available() or self.write_slurm is not None else "cpu"


Options = TypeVar("Options", bound=RunsOptions)


def read_runs_options(kind: type[Options], argv: Sequence[str], command: str) -> tuple[Options, list[str]]:
    """The options of such a command, and the overrides of all runs. Raises UserError."""
    options, overrides, problems = read_options_and_overrides(kind, argv, command)
    raise_problems(problems)
    if options.write_slurm is not None:
        require_new(options.write_slurm, "--write-slurm")
    return options, [*overrides, *(["--strict"] if options.strict else [])]


def carry_out(options: RunsOptions, runs: Sequence[Run]) -> dict[str, int] | None:
    """Train the runs that are not finished, and return the exit codes of the started ones by name; {} with --results.
    None if a script was written in place of the training."""
    for run in runs:
        if state_of(run) == "finished":
            require_same_settings(run)
    if options.write_slurm is not None:
        write_script(options.write_slurm, runs, options.processes)
        return None
    return {} if options.results else train_all(runs, partial(start_run, processes=options.processes))


def write_script(file: Path, runs: Sequence[Run], processes: int) -> None:
    """Write the script of a Slurm array with one run per task. processes: per node. Raises UserError."""
    text = array_script(runs, script=str(file), processes=processes)
    with new_output(file) as path:
        path.write_text(text, encoding="utf-8")
    print_lines(f"Script: {file} ({counted(len(runs), 'run')}); see its first lines")


def raise_failed(runs: Sequence[Run], codes: dict[str, int]) -> None:
    """Raise UserError if runs have failed."""
    if failed := [f"{name} ({code})" for name, code in codes.items() if code]:
        names = ", ".join(failed)
        raise UserError(
            f"{len(failed)} of {counted(len(runs), 'run')} failed: {names}; the same command starts them again"
        )


def processes_of_node() -> int:
    """The number of processes that run_train.sh starts."""
    return integer_variable("NGPU", max(usable_gpus(os.environ.get("DEVICE", "")), 1), least=1, most=MAX_PROCESSES)
