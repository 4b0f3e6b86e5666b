"""Record the first steps of the golden run. `python -m tests.golden.record` overwrites the record.

If these numbers change, the numerics of every run change. The commit message must state that.
"""

import json
import tempfile
from pathlib import Path

from tests.distributed.program import rows, start_command

FOLDER = Path(__file__).parent
RECORD = FOLDER / "first_steps.json"


def first_steps(dump_folder: Path) -> list[dict[str, float]]:
    """Train the golden configuration in one process; returns the loss and gradient norm of each step."""
    config = ["--job.config_file", str(FOLDER / "config.toml"), "--job.dump_folder", str(dump_folder)]
    program = start_command(dump_folder.parent, *config, "--data.sources.0.path", str(FOLDER / "tokens.npy"))
    if program.wait() != 0:
        raise RuntimeError(program.output)
    return [{key: row[key] for key in ("step", "loss", "grad_norm")} for row in rows(dump_folder)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        steps = first_steps(Path(temporary) / "out")
    RECORD.write_text("[\n" + ",\n".join(f"  {json.dumps(step)}" for step in steps) + "\n]\n")
    print(f"{len(steps)} steps written to {RECORD}")
