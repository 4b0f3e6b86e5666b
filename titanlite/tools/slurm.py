"""Scripts of Slurm jobs that train. sbatch copies a script: it names this installation by absolute paths."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from titanlite.runtime.text import visible

LAUNCH = Path(__file__).parents[1] / "ranks" / "slurm.sh"
"""What scripts/slurm.sbatch sources, too; the nodes see this installation."""

MOST_GPUS = 8
"""Processes per node that a script asks for at most."""

REQUEUED = """\
#SBATCH --time=24:00:00
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
set -euo pipefail
"""
"""The end of the settings of a script whose job saves before its time limit, and resumes."""

JOB = """\
#!/usr/bin/env bash
# A training of {config}. Written by titanlite. Change the lines #SBATCH to your cluster, then:
#
#     sbatch {script}
#
# A job that is stopped at its time limit or by a preemption saves first if checkpoints are enabled, and resumes. With
# MIN_NODES=N in the environment and sbatch --no-kill, it continues on at least N nodes if others are lost.
#
#SBATCH --job-name=titanlite
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{devices}#SBATCH --exclusive
#SBATCH --output=%x-%j.log
{requeued}cd {folder}
export PYTHON={python} PROCESSES=${{SLURM_GPUS_ON_NODE:-{processes}}}
# shellcheck source=/dev/null
source {launch}
train {words}
"""


def job_script(words: Sequence[str], *, config: str, script: str, world_size: int, device_type: str) -> str:
    """The text of the script of one training. words: of titanlite.train. config, script: paths, for its comments, of
    which no part begins a line. Nodes have as many processes as possible, up to MOST_GPUS, all nodes the same number.
    """
    processes = next(number for number in range(MOST_GPUS, 0, -1) if world_size % number == 0)
    return JOB.format(
        config=visible(config),
        script=visible(shlex.quote(script)),
        nodes=world_size // processes,
        devices=f"#SBATCH --gpus-per-node={processes}\n" if device_type == "cuda" else "",
        requeued=REQUEUED,
        folder=shlex.quote(os.getcwd()),
        python=shlex.quote(sys.executable),
        processes=processes,
        launch=shlex.quote(str(LAUNCH)),
        words=shlex.join(words),
    )
