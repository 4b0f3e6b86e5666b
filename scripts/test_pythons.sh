#!/usr/bin/env bash
# Run the quick size of the tests on several Pythons in turn, and print one line for each at the end:
#
#     ./scripts/test_pythons.sh                       each tested version: the first found on PATH, else in pyenv
#     ./scripts/test_pythons.sh 3.12 /path/to/python  these; fails if one is not found
#     ./scripts/test_pythons.sh 3.12 -- tests/unit    further arguments for pytest
#
# A Python that lacks a dependency gets its own environment, .venv-3.12 for 3.12, which is kept.
set -euo pipefail

# shellcheck source=scripts/environment.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/environment.sh"

# find_python VERSION|COMMAND: sets `version` (such as 3.12) and `interpreter`; fails if there is no such Python
find_python() {
    local candidates=("$1") candidate
    if [[ $1 =~ ^3\.[0-9]+$ ]]; then
        candidates=("python$1" python3 python "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$1".*/bin/python)
    fi
    for candidate in "${candidates[@]}"; do
        # sys.executable, since the command may be a shim of pyenv, which starts another Python in another folder
        read -r version interpreter < <("$candidate" -c \
            'import sys; print("%d.%d" % sys.version_info[:2], sys.executable)' 2>/dev/null) || continue
        [[ ${#candidates[@]} == 1 || $version == "$1" ]] && return
    done
    return 1
}

# test_on VERSION INTERPRETER ARGUMENT …: prints the versions in one line, then what pytest prints
test_on() {
    venv=$repo/.venv-$1
    PYTHON=$2
    shift 2
    use_environment test
    "$python" -c 'import importlib.metadata as m, platform
print("%-7s torch %-10s" % (platform.python_version(), m.version("torch")))'
    export PYTHON=$python
    exec "$repo/scripts/test.sh" "$@"
}

wanted=()
while (($# > 0)) && [[ $1 != -- ]]; do
    wanted+=("$1")
    shift
done
(($# == 0)) || shift
named=${#wanted[@]}
((named > 0)) || wanted=("${tested[@]}")

output=$(mktemp)
trap 'rm -f "$output"' EXIT
trap 'exit 130' INT # pytest ends by itself, with an exit code of its own
lines=()
failed=0
runs=0
for one in "${wanted[@]}"; do
    if ! find_python "$one"; then
        lines+=("$one: not found")
        ((named == 0)) || failed=1
        continue
    fi
    runs=$((runs + 1))
    start=$SECONDS
    set +e
    (
        set -e # which a function called from a condition would be without
        test_on "$version" "$interpreter" -m "not slow" "$@"
    ) | tee "$output"
    code=${PIPESTATUS[0]}
    set -e
    outcome=passed
    ((code == 0)) || outcome=FAILED failed=1
    if [[ -s $output ]]; then
        lines+=("$(head -n 1 "$output") $outcome $((SECONDS - start)) s: $(tail -n 1 "$output")")
    else
        lines+=("$version $outcome: no environment")
    fi
done
printf '%s\n' "" "${lines[@]}"
((runs > 0)) || die "found none of ${wanted[*]}: name the ones to test, such as $0 /path/to/python3.13"
exit "$failed"
