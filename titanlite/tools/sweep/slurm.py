"""The script of a Slurm array: one run of a sweep per task."""

import os
import shlex
import sys
from collections.abc import Sequence

from titanlite.config.files import CONFIG_FILE
from titanlite.tools.sweep.combinations import Run
from titanlite.tools.sweep.training import describe

HEAD = """\
#!/usr/bin/env bash
# {count} runs of {config}, one per task of a Slurm array. Written by titanlite sweep. Change the lines #SBATCH to your
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
#SBATCH --time=24:00:00
#SBATCH --output=%x-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
set -euo pipefail
cd {folder}
python={python}

case $SLURM_ARRAY_TASK_ID in
"""

BODY = """\
*)
    echo "no run has number $SLURM_ARRAY_TASK_ID" >&2
    exit 2
    ;;
esac

# From here on as scripts/slurm.sbatch, which explains it.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((10000 + SLURM_JOB_ID % 20000))
torchrun=(
    "$python" -m titanlite.torchrun
    --nnodes="$SLURM_JOB_NUM_NODES"
    --nproc-per-node="${{SLURM_GPUS_ON_NODE:-{processes}}}"
    --rdzv-backend=c10d
    --rdzv-endpoint="${{hosts[0]}}:$port"
    --rdzv-id="$SLURM_JOB_ID"
    --max-restarts=10
    "--log-dir=logs/$SLURM_JOB_ID"
    --tee=3
)
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 \\
    "${{torchrun[@]}}" -m titanlite.train "${{run[@]}}" &
step=$!

warned=false signalled=true
trap 'warned=true signalled=true; kill -USR1 "$step"' USR1
trap 'signalled=true' TERM
while $signalled; do
    signalled=false status=0
    wait "$step" || status=$?
done

if $warned && ((status != 0)); then
    echo "titanlite sweep: stopped before the time limit; requeueing job $SLURM_JOB_ID" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def array_script(runs: Sequence[Run], *, script: str, processes: int) -> str:
    """The text of the script. script: its path. processes: per node."""
    config = runs[0].arguments[0].removeprefix(f"--{CONFIG_FILE}=")
    text = HEAD.format(
        count=len(runs),
        config=config,
        script=shlex.quote(script),
        last=len(runs) - 1,
        processes=processes,
        folder=shlex.quote(os.getcwd()),
        python=shlex.quote(sys.executable),
    )
    for number, run in enumerate(runs):
        shown = "".join(char if char.isprintable() else " " for char in describe(run))
        text += f"{number}) # {shown}\n    run=({shlex.join(run.arguments)})\n    ;;\n"
    return text + BODY.format(processes=processes)
