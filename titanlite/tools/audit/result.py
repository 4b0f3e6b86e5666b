"""audit.json: what an audit has found, which a report of the run shows."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from titanlite.runtime.durability import replace_file
from titanlite.runtime.errors import UserError
from titanlite.runtime.json_files import JsonError, of_type, read_regular

AUDIT_FOLDER = "audit"
"""In the dump folder, unless --out gives another one."""
AUDIT_FILE = "audit.json"

MESH, DEVICE = "mesh", "device"
"""Names in `recorded` and `recomputed`."""

Verdict = Literal["reproduced", "within", "differs", "failed"]
SHOWN: dict[Verdict, str] = {
    "reproduced": "reproduced, bit for bit",
    "within": "reproduced within the rounding of this configuration",
    "differs": "NOT reproduced",
    "failed": "NOT reproduced, since it cannot be computed",
}


@dataclass(frozen=True)
class Result:
    """The audit of one interval. notes: what differs in what computed the steps. differences: lines; of "failed", why.
    recorded, recomputed: what computed the steps. command: computes them again."""

    first: int
    last: int
    verdict: Verdict
    notes: tuple[str, ...]
    differences: tuple[str, ...]
    recorded: dict[str, str]
    recomputed: dict[str, str]
    command: str
    created: str

    @property
    def is_reproduced(self) -> bool:
        return self.verdict in ("reproduced", "within")

    @property
    def hardware(self) -> str:
        """What computed the steps again; "" if nothing did."""
        return ", ".join(self.recomputed[name] for name in (DEVICE, MESH) if name in self.recomputed)

    @property
    def text(self) -> str:
        """The verdict, the notes, and a line for each difference."""
        return "\n".join([SHOWN[self.verdict], *self.notes, *self.differences]).replace("\n", "\n  ")

    def __str__(self) -> str:
        return f"{title(self.first, self.last)}: {self.text}"


def title(first: int, last: int) -> str:
    """The name of an interval in messages."""
    return f"steps {first:,} to {last:,}"


def add_results(folder: Path, run: str, results: Sequence[Result]) -> None:
    """Write the results into AUDIT_FILE, in place of earlier ones of the same intervals."""
    new = {(result.first, result.last): result for result in results}
    kept = [result for result in read_results(folder) if (result.first, result.last) not in new]
    every = sorted([*kept, *new.values()], key=lambda result: result.first)
    content = {"run": run, "intervals": [asdict(result) for result in every]}
    replace_file(folder / AUDIT_FILE, (json.dumps(content, indent=1) + "\n").encode())


@dataclass(frozen=True)
class _Audit:
    run: str
    intervals: tuple[Result, ...]


def read_results(folder: Path) -> Sequence[Result]:
    """The results in a folder, in the order of steps; () without any. Raises UserError if they cannot be read."""
    try:
        found: _Audit = of_type(read_regular(folder / AUDIT_FILE), _Audit)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (JsonError, OSError) as error:
        raise UserError(f"{folder / AUDIT_FILE} cannot be read: {error}; remove it, or audit again") from None
    return found.intervals
