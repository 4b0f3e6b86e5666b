"""Record the first steps of the golden run. `python -m tests.golden.record` overwrites the record.

If these numbers change, the numerics of every run change. The commit message must state that.

`python -m tests.golden.record run` replaces the run of test_saved_run.py: four steps on two ranks, and the checkpoint.
The expected steps stay; other last bits of the weights need other hashes of the export.
"""

import json
import shutil
import sys
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


def save_run(folder: Path) -> None:
    """Train the first four steps of the saved run in `folder`, and store its files."""
    for file in (FOLDER / "saved_run" / "config.toml", FOLDER / "tokens.npy"):
        shutil.copy(file, folder)
    program = start_command(folder, "config.toml", "--job.dump_folder", "run", "--training.steps", "4", ranks=2)
    if program.wait() != 0:
        raise RuntimeError(program.output)
    run, target = folder / "run", FOLDER / "saved_run" / "run"
    shutil.rmtree(target)
    shutil.copytree(run / "checkpoint", target / "checkpoint")
    for name in ("config.toml", "metrics.jsonl"):
        shutil.copy(run / name, target)


if __name__ == "__main__":
    if sys.argv[1:] == ["run"]:
        with tempfile.TemporaryDirectory() as temporary:
            save_run(Path(temporary))
        sys.exit()
    with tempfile.TemporaryDirectory() as temporary:
        steps = first_steps(Path(temporary) / "out")
    RECORD.write_text("[\n" + ",\n".join(f"  {json.dumps(step)}" for step in steps) + "\n]\n")
    print(f"{len(steps)} steps written to {RECORD}")
