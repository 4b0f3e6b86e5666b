"""Command: print what a run was trained on, the ledgers of all data ranks and restarts merged."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from titanlite.data.ledger import ledger_files, ledger_line, read_ledger
from titanlite.runtime.errors import UserError
from titanlite.tools.command import print_lines, read_options, run_command


@dataclass(frozen=True)
class Options:
    """Print what each step of a run was trained on."""

    dump_folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DUMP_FOLDER")]
    """job.dump_folder of a run with data.ledger = true"""


def main(argv: Sequence[str]) -> None:
    """Print the ledger of a run. Raises UserError."""
    folder = read_options(Options, argv, "ledger").dump_folder
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist: pass the dump folder of a run")
    if not ledger_files(folder):
        raise UserError(f"{folder} has no ledger: train with --data.ledger true")
    for step, rows in read_ledger(folder):
        print_lines(ledger_line(step, rows).removesuffix("\n"))


if __name__ == "__main__":
    run_command(main)
