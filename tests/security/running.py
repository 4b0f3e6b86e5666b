"""Run a command on a workplace, and list what is wrong with how it went."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from tests.security.commands import STARTS, Kind
from tests.security.guarded import Case, Guard, Outcome, files_of, server_of
from tests.security.workplace import Workplace

CPU_S = 10.0
PEAK_BYTES = 2**30
"""Above those of the guard itself, which has imported all modules; a clean input takes less than a tenth of both."""
FORGED = "FORGED"
"""What a stranger's text begins its own line with."""

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_RESUMES = {"train", "critical-batch"}
"""Commands that write into the run."""


def started(place: Workplace, command: str, kind: Kind) -> Case:
    """The case of a command on a workplace."""
    words = [word.format(run=place.run, config=place.config, data=place.data) for word in STARTS[command][kind].split()]
    writable = [place.out, place.root / "cache", place.root / "tmp", Path(os.environ["HF_HOME"])]
    if kind == "run" and command in _RESUMES:
        writable.append(place.here / "run")
    return Case((command, *words), place.here, place.environment(), tuple(writable), (server_of(place.own),))


def problems_of(guard: Guard, place: Workplace, case: Case) -> tuple[list[str], Outcome]:
    """Run the case; (what is wrong, how it went)."""
    before = files_of(place.root, *case.writable)
    outcome = guard.run(case)
    problems = list(outcome.noted)
    after = files_of(place.root, *case.writable)
    notes = {str(place.root / name) for name in ("output", "notes")}
    changed = [path for path in {*before, *after} - notes if before.get(path) != after.get(path)]
    problems += [f"changed: {path}" for path in sorted(changed)]
    code = outcome.code
    if code is None or not 0 <= code <= 2:
        problems.append("hangs" if code is None else f"exit code {code}")
    if "Traceback (most recent call last)" in outcome.output:
        problems.append("a traceback")
    if found := _CONTROL.findall(outcome.output):
        problems.append(f"prints {sorted(set(found))!r}")
    written = [each.read_text(errors="replace") for each in _text_files(place.out)]
    if any(line.lstrip("# ").startswith(FORGED) for text in (outcome.output, *written) for line in text.splitlines()):
        problems.append("a line that a stranger wrote")
    if outcome.cpu_s > CPU_S:
        problems.append(f"{outcome.cpu_s:.0f} s of CPU time")
    if outcome.peak_bytes > guard.idle_bytes + PEAK_BYTES:
        problems.append(f"{(outcome.peak_bytes - guard.idle_bytes) / 2**30:.1f} GiB")
    return problems, outcome


def _text_files(folder: Path) -> Sequence[Path]:
    names = {".sbatch", ".toml", ".log", ".html", ".json"}
    return [path for path in folder.rglob("*") if path.suffix in names and path.is_file() and not path.is_symlink()]
