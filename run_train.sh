#!/usr/bin/env bash
# Train, on several processes with torchrun. Creates .venv first if titanlite or a dependency cannot be imported.
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
#     NNODES=MIN:MAX elastic: trains on MIN to MAX nodes, whichever are there; when nodes are lost or join, it restarts
#                    with the others. Set RDZV_ENDPOINT on each node, as above, but not NODE_RANK, and optionally:
#     MAX_RESTARTS   restarts after failures, not counting those for nodes that join; default: 100
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

case ${DEVICE:-} in
"" | cuda) ;;
cpu) export CUDA_VISIBLE_DEVICES="" ;;
*) refuse "DEVICE=$DEVICE: must be cpu, cuda, or not set" ;;
esac
[[ -z ${NGPU:-} ]] || require_integer NGPU 1 "the number of processes on this node"
# require_endpoint MEANING: exits unless RDZV_ENDPOINT is host:port
require_endpoint() {
    [[ ${RDZV_ENDPOINT:-} =~ ^.+:[0-9]+$ ]] ||
        refuse "RDZV_ENDPOINT=${RDZV_ENDPOINT:-}: must be host:port of $1, such as 10.0.0.1:29500"
}

NNODES=${NNODES:-1}
nodes=()
if [[ $NNODES == *:* ]]; then
    fewest=${NNODES%%:*} most=${NNODES#*:}
    for number in "$fewest" "$most"; do
        [[ $number =~ ^[1-9][0-9]{0,8}$ ]] || refuse "NNODES=$NNODES: must be MIN:MAX, integers from 1"
    done
    ((fewest < most)) || refuse "NNODES=$NNODES: MIN must be below MAX; for a fixed number of nodes, NNODES=$most"
    [[ -z ${NODE_RANK:-} ]] || refuse "NODE_RANK=$NODE_RANK: must not be set with NNODES=$NNODES, whose nodes come and go"
    require_endpoint "the node that is never lost"
    MAX_RESTARTS=${MAX_RESTARTS:-100}
    require_integer MAX_RESTARTS 0 "the number of restarts"
    # The endpoint names the run, too: launches with equal names are one.
    nodes=(
        --nnodes="$NNODES" --rdzv-backend=c10d --rdzv-endpoint="$RDZV_ENDPOINT" --rdzv-id="$RDZV_ENDPOINT"
        --max-restarts="$MAX_RESTARTS"
    )
else
    require_integer NNODES 1 "the number of nodes"
    if ((NNODES > 1)); then
        [[ -n ${NODE_RANK:-} && -n ${RDZV_ENDPOINT:-} ]] ||
            refuse "NNODES=$NNODES needs NODE_RANK (the rank of this node, 0 to $((NNODES - 1))) and RDZV_ENDPOINT (host:port of node 0)"
        require_integer NODE_RANK 0 "the rank of this node"
        ((NODE_RANK < NNODES)) || refuse "NODE_RANK=$NODE_RANK: must be below NNODES=$NNODES"
        require_endpoint "node 0"
        nodes=(--nnodes="$NNODES" --node-rank="$NODE_RANK" --rdzv-backend=static --rdzv-endpoint="$RDZV_ENDPOINT")
    fi
fi

# shellcheck disable=SC2119 # without extras
use_environment

config=(--job.config_file "${CONFIG_FILE:-$repo/configs/quickstart.toml}")
[[ ${1:-} == "" || $1 == -* ]] || config=() # CONFIG as the first argument
for argument in "$@"; do
    case $argument in
    --job.config_file | --job.config_file=* | --job.config-file | --job.config-file=*) config=() ;;
    esac
done

# Do not import a titanlite in the current folder
export PYTHONSAFEPATH=1
# For the commands that a run suggests at its end
export TITANLITE_RUN_TRAIN=$0
[[ $0 == */* ]] || TITANLITE_RUN_TRAIN=./$0
# torchrun kills ranks that still run so many seconds after a signal (fixed at 30 seconds in torch 2.11)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}
exec "$python" -m titanlite.torchrun.launcher ${nodes[@]+"${nodes[@]}"} -- ${config[@]+"${config[@]}"} "$@"
