#!/usr/bin/env bash
# Run the tests in the same environment as run_train.sh; arguments are passed to pytest. Sizes, with budgets on 2 cores:
#
#     ./scripts/test.sh -m "not slow"     2 minutes
#     ./scripts/test.sh                   12 minutes: the default suite, which CI runs
#     ./scripts/test.sh -m soak           sweeps without a time limit
#
# On another Python, in an environment of its own: PYTHON=python3.12 VENV=.venv-3.12 ./scripts/test.sh
#
# Up to 4 workers share the files; -n 0 runs all tests in one process, for -s, --pdb and benchmarks.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/environment.sh"

use_environment test
cd "$repo"
export OMP_NUM_THREADS=1 # tests start several ranks
unset PYTHONDONTWRITEBYTECODE # otherwise each worker and program compiles all files
# Keep the order of the files: the slow ones, with several ranks, come first
exec "$python" -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder "$@"
