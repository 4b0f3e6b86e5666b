"""What was trained on: for each step, where each of its sequences comes from.

<dump_folder>/ledger holds a file per data rank, <rank>-of-<degree>.jsonl, with a line for each step:

    {"step": 3, "sequences": [[sequence, source, epoch, piece, offset], ...]}

sequence: its number in the run, from 0. source: which of [[data.sources]]. epoch, piece, offset: its first token is
number `offset` of that piece of the source; -1 where it has no token, since the source has ended.
"""

import json
import runpy
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
        self._file.write(ledger_line(step, rows))
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


def ledger_line(step: int, rows: list[list[int]]) -> str:
    """A line of the ledger."""
    return json.dumps({"step": step, "sequences": rows}, separators=(",", ":")) + "\n"


if __name__ == "__main__":  # an older name of the command
    runpy.run_module("titanlite.tools.ledger", run_name="__main__", alter_sys=True)
