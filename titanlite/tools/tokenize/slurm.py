"""The script of a Slurm array whose tasks write the parts."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from titanlite.runtime.environment import safe_imports
from titanlite.runtime.errors import UserError
from titanlite.runtime.text import visible
from titanlite.tools.outputs import new_output

MAX_TASKS = 1000
"""Tasks of an array without --workers: Slurm's default limit is 1001."""

SCRIPT = """\
#!/usr/bin/env bash
# {parts} parts of {out}, shared by {tasks} tasks of a Slurm array. Written by titanlite. Change the lines #SBATCH to
# your cluster, then:
#
#     sbatch {script}
#
# The task that writes the last part completes the folder. If tasks were lost, submit the script again: finished parts
# are not done again.
#
#SBATCH --job-name=titanlite-tokenize
#SBATCH --array=0-{last}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
#SBATCH --mem=3G
#SBATCH --time=24:00:00
#SBATCH --output=%x-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
set -euo pipefail
cd {folder}
exec {command} --part "$SLURM_ARRAY_TASK_ID" --tasks {tasks}
"""


def write_script(path: Path, *, out: str, parts: int, tasks: int, arguments: Sequence[str]) -> None:
    """Write the script. arguments: of titanlite tokenize, for each task. What its comments quote begins no line.
    Raises UserError."""
    tasks = min(tasks, parts)
    variables = [f"{name}={value}" for name, value in safe_imports().items()]
    text = SCRIPT.format(
        parts=f"{parts:,}",
        out=visible(shlex.quote(out)),
        tasks=tasks,
        last=tasks - 1,
        script=visible(shlex.quote(str(path))),
        folder=shlex.quote(os.getcwd()),
        command=shlex.join(["env", *variables, sys.executable, "-P", "-m", "titanlite", "tokenize", *arguments]),
    )
    with new_output(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def submit(path: Path) -> str:
    """Submit the script; return what sbatch prints. Raises UserError."""
    try:
        done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(f"sbatch is not on this machine: submit {path} where it is") from None
    if done.returncode:
        raise UserError(f"sbatch {path} failed: {done.stderr.strip()}; fix the lines #SBATCH, then submit it again")
    return done.stdout.strip()
