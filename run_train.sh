#!/usr/bin/env bash
# Train with torchrun. Creates .venv first if titanlite or a dependency cannot be imported.
#
#     ./run_train.sh [CONFIG] [--section.key value …]        all arguments are passed to titanlite.train
#
#     CONFIG_FILE    the run's TOML file, if the arguments have none; default: configs/quickstart.toml of this checkout
#     NGPU           processes on this node; default: the number of GPUs, else 1
#     DEVICE         cpu: do not use GPUs; cuda: fail without a GPU; default: GPUs if available
#     PYTHON         the Python to use instead of the active one
#     NNODES         number of nodes; if above 1, set on each node:
#     NODE_RANK      rank of this node, from 0
#     RDZV_ENDPOINT  host:port of node 0, the same on all nodes
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/scripts/environment.sh"

# As every command: exit with 2 for invalid arguments
refuse() {
    printf 'titanlite: %s\n' "$*" >&2
    exit 2
}

# require_integer NAME MINIMUM MEANING: exits unless the variable's value is an integer of at least MINIMUM
require_integer() {
    if ! [[ ${!1} =~ ^(0|[1-9][0-9]{0,8})$ ]] || ((${!1} < $2)); then
        refuse "$1=${!1}: $3 must be an integer, at least $2"
    fi
}

device=${DEVICE:-}
case $device in
"" | cuda) ;;
cpu) export CUDA_VISIBLE_DEVICES="" ;;
*) refuse "DEVICE=$device: must be cpu, cuda, or not set" ;;
esac
[[ -z ${NGPU:-} ]] || require_integer NGPU 1 "the number of processes on this node"
NNODES=${NNODES:-1}
require_integer NNODES 1 "the number of nodes"
if ((NNODES > 1)); then
    [[ -n ${NODE_RANK:-} && -n ${RDZV_ENDPOINT:-} ]] ||
        refuse "NNODES=$NNODES needs NODE_RANK (the rank of this node, 0 to $((NNODES - 1))) and RDZV_ENDPOINT (host:port of node 0)"
    require_integer NODE_RANK 0 "the rank of this node"
    ((NODE_RANK < NNODES)) || refuse "NODE_RANK=$NODE_RANK: must be below NNODES=$NNODES"
    [[ $RDZV_ENDPOINT =~ ^.+:[0-9]+$ ]] ||
        refuse "RDZV_ENDPOINT=$RDZV_ENDPOINT: must be host:port of node 0, such as 10.0.0.1:29500"
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

if ((gpus > 0)) && [[ -z ${PYTORCH_ALLOC_CONF+set}${PYTORCH_CUDA_ALLOC_CONF+set}${PYTORCH_HIP_ALLOC_CONF+set} ]]; then
    export PYTORCH_ALLOC_CONF=expandable_segments:True # less fragmentation; torch prefers this name to the older ones
fi
if ((gpus == 0)) && [[ -z ${OMP_WAIT_POLICY:-} ]]; then
    # on a busy machine, threads that spin for long make a step several times as long (docs/LOG.md)
    export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000}
fi

config=(--job.config_file "${CONFIG_FILE:-$repo/configs/quickstart.toml}")
[[ ${1:-} == "" || $1 == -* ]] || config=() # CONFIG as the first argument
for argument in "$@"; do
    case $argument in
    --job.config_file | --job.config_file=* | --job.config-file | --job.config-file=*) config=() ;;
    esac
done

# Workers run the chosen Python, whichever torchrun is on PATH, and do not import a titanlite in the current folder
export PYTHON_EXEC=$python PYTHONSAFEPATH=1
launcher=(torchrun)
command -v torchrun >/dev/null || launcher=("$python" -m torch.distributed.run)
# Torchrun forwards these signals to its workers, which save and exit, and kills workers that still run after the
# timeout (fixed at 30 seconds in torch 2.11). SIGHUP is not forwarded, so that nohup works.
signals=("--signals-to-handle=SIGTERM,SIGINT,SIGUSR1")
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}
exec "${launcher[@]}" "${nodes[@]}" --nproc-per-node="$NGPU" "${signals[@]}" -m titanlite.train ${config[@]+"${config[@]}"} "$@"
