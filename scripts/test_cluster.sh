#!/usr/bin/env bash
# Test scripts/slurm.sbatch and the arrays of sweeps on a real Slurm, whose two nodes are on this machine, and launchers
# between network namespaces; arguments are passed to pytest. Needs root on Debian or Ubuntu, where it installs Slurm if
# that is missing; elsewhere the tests are skipped with a reason.
set -euo pipefail

if [[ $EUID == 0 ]] && command -v apt-get >/dev/null && ! command -v slurmctld >/dev/null; then
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends slurm-wlm munge iproute2
fi
exec "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/test.sh" -m soak -n 0 -rs "$@" tests/cluster
