#!/usr/bin/env bash
# Runs the tests, in the same environment as run_train.sh; arguments go to pytest. Three sizes:
#
#     ./scripts/test.sh -m "not slow"     minutes
#     ./scripts/test.sh                   the default suite, which CI runs
#     ./scripts/test.sh -m soak           sweeps, without a time limit
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/environment.sh"

use_environment test
cd "$repo"
export OMP_NUM_THREADS=1 # tests start several ranks
exec "$python" -m pytest "$@"
