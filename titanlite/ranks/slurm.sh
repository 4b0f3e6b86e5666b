# shellcheck shell=bash
# The training of a Slurm job: one launcher per node, and a requeue after a stop by Slurm.
#
# scripts/slurm.sbatch and the arrays of `titanlite sweep` source this file, then end with
#     train ARGUMENTS…        those of titanlite.train
#
# Variables: PYTHON, the interpreter of all nodes. PROCESSES, those of each node; default: Slurm's number of GPUs.
# MIN_NODES=N with sbatch --no-kill: the job continues on at least N nodes if others are lost, but not without the first.

# Seconds that a save may take after a signal before torchrun kills its ranks (torch 2.11: 30 seconds, fixed).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240

# Import nothing from the current folder, except this titanlite.
export PYTHONSAFEPATH=1
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[[ $root != "$(pwd)" ]] || export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

# A task of an array is named by the array: the number of its first task alone names all tasks.
job=$SLURM_JOB_ID
[[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

# Runs on each node, where Slurm's variables are those of the node.
# shellcheck disable=SC2016
on_node='
processes=$1; shift
gpus=${SLURM_GPUS_ON_NODE:-0}
if ((gpus > processes)); then
    echo "slurm: $SLURMD_NODENAME has $gpus GPUs, of which $processes are used: all nodes start as many processes as the" \
        "first one; ask for equal nodes (sbatch --gpus-per-node)" >&2
fi
exec "$@"
'

train() {
    local processes=${PROCESSES:-${SLURM_GPUS_ON_NODE:-}}
    if [[ -z $processes ]]; then
        echo "slurm: Slurm gave this job no GPUs, so each node starts one process (sbatch --gpus-per-node=N)" >&2
        processes=1
    fi
    # Without --kill-on-bad-exit: a node whose ranks have exited after a signal must not end one that still saves. After
    # 60 s it is lost: its launcher waits for one that was killed.
    local nodes=$SLURM_JOB_NUM_NODES lost_nodes=(--wait=60)
    if [[ -n ${MIN_NODES:-} ]]; then
        nodes=$MIN_NODES:$nodes lost_nodes=(--no-kill)
    fi
    local hosts
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    local torchrun=(
        "$PYTHON" -m titanlite.torchrun # checks the configuration, then runs torchrun in the same process
        --nnodes="$nodes"
        --nproc-per-node="$processes"
        # With c10d, all nodes restart at once if a rank on one of them dies.
        --rdzv-backend=c10d
        --rdzv-endpoint="${hosts[0]}:$((10000 + SLURM_JOB_ID % 20000))" # jobs that share a node use different ports
        --rdzv-id="$SLURM_JOB_ID"                                       # the same for all starts of the job
        # After a rank dies, each start resumes from the latest checkpoint.
        --max-restarts=10
        # A log per rank and start, beside the common one.
        "--log-dir=logs/$SLURM_JOB_ID"
        --tee=3
    )
    srun "${lost_nodes[@]}" --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 \
        bash -c "$on_node" bash "$processes" "${torchrun[@]}" -m titanlite.train "$@" &
    local step=$!

    # srun forwards SIGUSR1 to its tasks, one torchrun per node; on SIGTERM it would kill them. Slurm itself sends SIGTERM
    # to the tasks of a preempted job. The shell runs these traps between its waits.
    local warned=false signalled=true status=0
    trap 'warned=true signalled=true; kill -USR1 "$step"' USR1
    trap 'signalled=true' TERM
    while $signalled; do
        signalled=false status=0
        wait "$step" || status=$?
    done

    # torchrun exits with 0 if the training is finished, and never after a signal.
    if ((status != 0)) && must_requeue "$warned"; then
        scontrol requeue "$job"
    fi
    exit "$status"
}

# must_requeue WARNED: whether Slurm stopped the job, before its time limit or by a preemption, and nobody cancelled it.
# Slurm requeues a preempted job only if its script still runs at the end of the GraceTime.
must_requeue() {
    local facts state
    facts=$(scontrol show job --oneliner "$job")
    state=$(fact JobState)
    if [[ $state != RUNNING && $state != SIGNALING ]]; then
        echo "slurm: job $job is ${state:-unknown to Slurm}, so it is not requeued" >&2
        return 1
    elif $1; then
        echo "slurm: stopped before the time limit; requeueing job $job" >&2
    elif [[ $(fact PreemptTime) =~ ^[0-9] ]]; then # else None: of this start
        echo "slurm: stopped by a preemption; requeueing job $job" >&2
    else
        return 1
    fi
}

fact() {
    sed -n "s/.* $1=\([^ ]*\).*/\1/p" <<<"$facts"
}
