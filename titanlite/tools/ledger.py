"""Command: what a run was trained on, the lines of all data ranks and starts as one ledger.

python -m titanlite ledger DUMP_FOLDER
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from titanlite.data.ledger import LEDGER_FOLDER, ledger_files, ledger_line, read_ledger
from titanlite.tools.command import run_command


def main(argv: Sequence[str]) -> None:
    """Print the ledger of a run."""
    parser = argparse.ArgumentParser("titanlite ledger", description="Print what a run was trained on.")
    parser.add_argument("dump_folder", metavar="DUMP_FOLDER", type=Path, help="job.dump_folder of a run with a ledger")
    folder = parser.parse_args(argv).dump_folder
    if not ledger_files(folder):
        parser.error(f"{folder / LEDGER_FOLDER} holds no ledger: train with --data.ledger true")
    for step, rows in read_ledger(folder):
        print(ledger_line(step, rows), end="")


if __name__ == "__main__":
    run_command(main)
