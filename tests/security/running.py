"""Run a command on a workplace, and list what is wrong with how it went."""

import os
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

from tests.security.commands import STARTS, Kind
from tests.security.guarded import Case, Guard, Outcome, files_of, server_of
from tests.security.workplace import Workplace

CPU_S = 10.0
PEAK_BYTES = 2**30
"""Above those of the guard itself, which has imported all modules; a clean input takes less than a tenth of both."""
FORGED = "FORGED"
"""What a stranger's text begins its own line with."""

SCRIPT = "stranger()"

_CHECKED = {"ladder": 9, "parity": 5, "inspect": 3}
"""Times that a command reads the data, for trainings, ranks or packings: the limit of CPU time is for each."""

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
    if any(_runs_scripts(each.read_text(errors="replace")) for each in place.out.rglob("*.html")):
        problems.append("a page with a stranger's script")
    if outcome.cpu_s > CPU_S * _CHECKED.get(case.argv[0], 1):
        problems.append(f"{outcome.cpu_s:.0f} s of CPU time")
    if outcome.peak_bytes > guard.idle_bytes + PEAK_BYTES:
        problems.append(f"{(outcome.peak_bytes - guard.idle_bytes) / 2**30:.1f} GiB")
    return problems, outcome


def _text_files(folder: Path) -> Sequence[Path]:
    # In an .sbatch, a quoted name may have several lines: tests/unit/tools/sweep/test_slurm.py runs these scripts.
    names = {".toml", ".log", ".json"}
    return [path for path in folder.rglob("*") if path.suffix in names and path.is_file() and not path.is_symlink()]


def _runs_scripts(page: str) -> bool:
    """Whether an element of a page has SCRIPT as its code."""
    found: list[str] = []

    class Elements(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.is_script = tag == "script"
            found.extend(f"{value}" for name, value in attrs if name.startswith("on"))

        def handle_data(self, data: str) -> None:
            if getattr(self, "is_script", False):
                found.append(data)

        def handle_endtag(self, tag: str) -> None:
            self.is_script = self.is_script and tag != "script"

    Elements().feed(page)
    return any(SCRIPT in each for each in found)
