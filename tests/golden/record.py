"""The first steps of the golden run. `python -m tests.golden.record` puts them on record anew.

A change of these numbers is a change of numerics: every run of every user changes with it, and its commit says so.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parents[1]
RECORD = FOLDER / "first_steps.json"


def first_steps(dump_folder: Path) -> list[dict[str, float]]:
    """Trains the golden configuration in one process, as a user would; loss and gradient norm of each step."""
    config = ["--job.config_file", str(FOLDER / "config.toml"), "--job.dump_folder", str(dump_folder)]
    subprocess.run([sys.executable, "-m", "titanlite.train", *config], check=True, cwd=REPOSITORY, capture_output=True)
    rows = [json.loads(line) for line in (dump_folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in ("step", "loss", "grad_norm")} for row in rows]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        rows = first_steps(Path(temporary))
    RECORD.write_text("[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n")
    print(f"{len(rows)} steps written to {RECORD}")
