"""The script of a Slurm array: one run of a sweep per task."""

import os
import shlex
import sys
from collections.abc import Sequence

from titanlite.config.files import CONFIG_FILE
from titanlite.runtime.text import visible
from titanlite.tools.slurm import LAUNCH, REQUEUED
from titanlite.tools.sweep.combinations import Run
from titanlite.tools.sweep.training import describe

HEAD = """\
#!/usr/bin/env bash
# {count} runs of {config}, one per task of a Slurm array. Written by titanlite. Change the lines #SBATCH to your
# cluster, then:
#
#     sbatch {script}
#
# A task that is stopped at its time limit or by a preemption saves first if checkpoints are enabled, and resumes.
#
#SBATCH --job-name=titanlite-sweep
#SBATCH --array=0-{last}
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={processes}
#SBATCH --output=%x-%A_%a.log
{requeued}cd {folder}
export PYTHON={python}

case $SLURM_ARRAY_TASK_ID in
"""

BODY = """\
*)
    echo "no run has number $SLURM_ARRAY_TASK_ID" >&2
    exit 2
    ;;
esac

export PROCESSES=${{SLURM_GPUS_ON_NODE:-{processes}}}
# shellcheck source=/dev/null
source {launch}
train "${{run[@]}}"
"""


def array_script(runs: Sequence[Run], *, script: str, processes: int) -> str:
    """The text of the script. script: its path. processes: per node. What its comments quote begins no line."""
    config = runs[0].arguments[0].removeprefix(f"--{CONFIG_FILE}=")
    text = HEAD.format(
        count=len(runs),
        config=visible(config),
        script=visible(shlex.quote(script)),
        last=len(runs) - 1,
        processes=processes,
        requeued=REQUEUED,
        folder=shlex.quote(os.getcwd()),
        python=shlex.quote(sys.executable),
    )
    for number, run in enumerate(runs):
        text += f"{number}) # {visible(describe(run))}\n    run=({shlex.join(run.arguments)})\n    ;;\n"
    return text + BODY.format(processes=processes, launch=shlex.quote(str(LAUNCH)))
