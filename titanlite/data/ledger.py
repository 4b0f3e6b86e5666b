"""What was trained on: for each step, where each of its sequences comes from.

<dump_folder>/ledger holds a file per data rank, <rank>-of-<degree>.jsonl, with a line for each step:

    {"step": 3, "sequences": [[sequence, source, epoch, piece, offset], ...]}

sequence: its number in the run, from 0. source: which of [[data.sources]]. epoch, piece, offset: its first token is
number `offset` of that piece of the source; -1 where it has no token, since the source has ended.

python -m titanlite.data.ledger DUMP_FOLDER      prints the lines of all data ranks and starts as one ledger
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import groupby
from pathlib import Path

from titanlite.data.streams import Origin
from titanlite.runtime.errors import UserError

LEDGER_FOLDER = "ledger"


class Ledger:
    """Writes the lines of one data rank; one of its ranks has it. Goes on behind what an earlier start has written."""

    def __init__(self, dump_folder: str | Path, *, data_rank: int, data_degree: int) -> None:
        path = Path(dump_folder, LEDGER_FOLDER, f"{data_rank}-of-{data_degree}.jsonl")
        try:
            path.parent.mkdir(exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"data.ledger: {path} cannot be written: {error.strerror}") from None

    def write(self, step: int, sequences: Sequence[int], origins: Sequence[Origin]) -> None:
        """The step's line; it is out of this process's hands on return."""
        rows = [[sequence, *origin] for sequence, origin in zip(sequences, origins, strict=True)]
        self._file.write(_line(step, rows))
        self._file.flush()

    def close(self) -> None:
        """End writing."""
        self._file.close()


def ledger_files(dump_folder: str | Path) -> list[Path]:
    """Those of all data ranks of all starts."""
    return sorted(Path(dump_folder, LEDGER_FOLDER).glob("*-of-*.jsonl"))


def read_ledger(dump_folder: str | Path) -> Iterator[tuple[int, list[list[int]]]]:
    """Of each step: its number, and [sequence, source, epoch, piece, offset] of its sequences in the run's order."""
    lines = merge(*(_steps(path) for path in ledger_files(dump_folder)), key=lambda line: line[0])
    for step, parts in groupby(lines, key=lambda line: line[0]):
        yield step, sorted(row for _, rows in parts for row in rows)


def _steps(path: Path) -> Iterator[tuple[int, list[list[int]]]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):  # being written now, or cut by a crash: a run that goes on writes it anew
                return
            values = json.loads(line)
            yield values["step"], values["sequences"]


def _line(step: int, rows: list[list[int]]) -> str:
    return json.dumps({"step": step, "sequences": rows}, separators=(",", ":")) + "\n"


def main() -> None:
    """Print the ledger of a run."""
    parser = argparse.ArgumentParser("titanlite.data.ledger", description="Print what a run was trained on.")
    parser.add_argument("dump_folder", metavar="DUMP_FOLDER", type=Path, help="job.dump_folder of a run with a ledger")
    folder = parser.parse_args().dump_folder
    if not ledger_files(folder):
        parser.error(f"{folder / LEDGER_FOLDER} holds no ledger: train with --data.ledger true")
    try:
        for step, rows in read_ledger(folder):
            print(_line(step, rows), end="")
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)


if __name__ == "__main__":
    main()
