#!/usr/bin/env bash
# Runs the tests, in the same environment as run_train.sh; arguments go to pytest. Three sizes, with budgets on 2 cores:
#
#     ./scripts/test.sh -m "not slow"     2 minutes
#     ./scripts/test.sh                   12 minutes: the default suite, which CI runs
#     ./scripts/test.sh -m soak           sweeps, without a time limit
#
# Files are dealt to up to 4 workers; -n 0 runs all tests in one process, for -s, --pdb and benchmarks.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/environment.sh"

use_environment test
cd "$repo"
export OMP_NUM_THREADS=1 # tests start several ranks
unset PYTHONDONTWRITEBYTECODE # each worker and program compiles the tests anew without
# In the order of the files: the long ones, of several ranks, come first
exec "$python" -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder "$@"
