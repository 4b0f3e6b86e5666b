#!/usr/bin/env bash
# Trains: sets up .venv where titanlite or its dependencies cannot be imported, then starts titanlite.train by torchrun.
#
#     ./run_train.sh [--section.key value …]        everything on the command line goes to titanlite.train
#
#     CONFIG_FILE    the run's TOML file; default: configs/quickstart.toml of this checkout
#     NGPU           processes on this node; default: the number of GPUs, else 1
#     DEVICE         cpu: leave GPUs alone; cuda: insist on them; default: GPUs where there are any
#     PYTHON         the Python to use instead of the active one
#     NNODES         number of nodes; above 1, on each node:
#     NODE_RANK      its number, from 0
#     RDZV_ENDPOINT  host:port of node 0, the same on all nodes
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/scripts/environment.sh"

# whole_number NAME MINIMUM MEANING: ends the script where the variable's value is not one
whole_number() {
    if ! [[ ${!1} =~ ^(0|[1-9][0-9]{0,8})$ ]] || ((${!1} < $2)); then
        die "$1=${!1}: $3 is a whole number, at least $2"
    fi
}

device=${DEVICE:-}
case $device in
"" | cuda) ;;
cpu) export CUDA_VISIBLE_DEVICES="" ;;
*) die "DEVICE=$device: it is cpu, cuda, or not set" ;;
esac
[[ -z ${NGPU:-} ]] || whole_number NGPU 1 "the number of processes on this node"
NNODES=${NNODES:-1}
whole_number NNODES 1 "the number of nodes"
if ((NNODES > 1)); then
    [[ -n ${NODE_RANK:-} && -n ${RDZV_ENDPOINT:-} ]] ||
        die "NNODES=$NNODES needs NODE_RANK (this node's number, 0 to $((NNODES - 1))) and RDZV_ENDPOINT (host:port of node 0)"
    whole_number NODE_RANK 0 "this node's number"
    ((NODE_RANK < NNODES)) || die "NODE_RANK=$NODE_RANK: this node's number is below NNODES=$NNODES"
    [[ $RDZV_ENDPOINT =~ ^.+:[0-9]+$ ]] ||
        die "RDZV_ENDPOINT=$RDZV_ENDPOINT: it is host:port of node 0, such as 10.0.0.1:29500"
    nodes=(--nnodes="$NNODES" --node-rank="$NODE_RANK" --rdzv-backend=static --rdzv-endpoint="$RDZV_ENDPOINT")
else
    nodes=(--standalone)
fi

# shellcheck disable=SC2119 # without extras
use_environment

gpus=$(check "$python" gpus "$device") || die "${gpus:-torch cannot be imported}"
NGPU=${NGPU:-$((gpus > 0 ? gpus : 1))}
if ((NGPU > 1)) && [[ -z ${OMP_NUM_THREADS:-} ]]; then # torchrun would set 1, with a warning
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=$((cores > NGPU ? cores / NGPU : 1))
    say "OMP_NUM_THREADS=$OMP_NUM_THREADS ($cores cores, $NGPU processes)"
fi

if ((gpus == 0)); then # threads that spin while they wait cost a busy machine several times the step (docs/LOG.md)
    export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
fi

config=(--job.config_file "${CONFIG_FILE:-$repo/configs/quickstart.toml}")
for argument in "$@"; do
    case $argument in # the command line's own wins
    --job.config_file | --job.config_file=* | --job.config-file | --job.config-file=*) config=() ;;
    esac
done

# Workers run the chosen Python whichever torchrun PATH has, and never a titanlite that is merely in the current folder
export PYTHON_EXEC=$python PYTHONSAFEPATH=1
launcher=(torchrun)
command -v torchrun >/dev/null || launcher=("$python" -m torch.distributed.run)
# Torchrun passes these signals on to its workers, which save and end, and kills what has not ended after the timeout
# (torch 2.11 knows no other than its 30 seconds). Not SIGHUP, which would undo nohup.
signals=("--signals-to-handle=SIGTERM,SIGINT,SIGUSR1")
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}
exec "${launcher[@]}" "${nodes[@]}" --nproc-per-node="$NGPU" "${signals[@]}" -m titanlite.train ${config[@]+"${config[@]}"} "$@"
