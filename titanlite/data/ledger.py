"""The ledger of a run: the origin of each sequence of each step.

<dump_folder>/ledger holds one file per data rank, <rank>-of-<degree>.jsonl, with a line for each step:

    {"step": 3, "sequences": [[sequence, source, epoch, piece, offset], ...]}

sequence: number in the run, from 0. source: index of the [[data.sources]] table. epoch, piece, offset: the first token
is token `offset` of this piece; -1 if the sequence is masked because the source is exhausted.
"""

import json
from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import groupby
from pathlib import Path

from typing_extensions import TypedDict

from titanlite.data.streams import Origin
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import no_link, open_regular
from titanlite.runtime.json_files import JsonError, parse_json
from titanlite.runtime.row_files import RowIndex, no_kinds

LEDGER_FOLDER = "ledger"


class Ledger:
    """Writer of one data rank's lines, on one rank of each data rank. Appends to the file of an earlier start."""

    def __init__(self, dump_folder: str | Path, *, data_rank: int, data_degree: int) -> None:
        path = Path(dump_folder, LEDGER_FOLDER, f"{data_rank}-of-{data_degree}.jsonl")
        try:
            path.parent.mkdir(exist_ok=True)
            self._file = open(path, "a", encoding="utf-8", opener=no_link)  # noqa: SIM115
            self._index = RowIndex(path, no_kinds)
        except OSError as error:
            raise UserError(f"data.ledger: {path} cannot be written: {error.strerror or error}") from None

    def write(self, step: int, sequences: Sequence[int], origins: Sequence[Origin]) -> None:
        """Write the line of a step and flush it to the operating system."""
        rows = [[sequence, *origin] for sequence, origin in zip(sequences, origins, strict=True)]
        line = ledger_line(step, rows)
        self._file.write(line)
        self._file.flush()
        self._index.note([(step, 0, len(line))])

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._index.close()


def ledger_files(dump_folder: str | Path) -> list[Path]:
    """Ledger files of all data ranks and all starts."""
    return sorted(Path(dump_folder, LEDGER_FOLDER).glob("*-of-*.jsonl"))


def read_ledger(dump_folder: str | Path) -> Iterator[tuple[int, list[list[int]]]]:
    """Yield each step and the [sequence, source, epoch, piece, offset] of its sequences, in the order of the run.

    Raises UserError.
    """
    lines = merge(*(_steps(path) for path in ledger_files(dump_folder)), key=lambda line: line[0])
    for step, parts in groupby(lines, key=lambda line: line[0]):
        yield step, sorted(row for _, rows in parts for row in rows)


def _steps(path: Path) -> Iterator[tuple[int, list[list[int]]]]:
    try:
        with open_regular(path) as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):  # being written, or truncated by a crash: a resumed run writes it again
                    return
                try:
                    values = parse_json(line, _Line)
                except JsonError as error:
                    raise UserError(f"{path}: line {number} {error}; restore the file, or remove this line") from None
                yield values["step"], values["sequences"]
    except JsonError as error:
        raise UserError(f"{path} {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


class _Line(TypedDict):
    step: int
    sequences: list[list[int]]


def ledger_line(step: int, rows: list[list[int]]) -> str:
    """Format a line of the ledger."""
    return json.dumps({"step": step, "sequences": rows}, separators=(",", ":")) + "\n"
