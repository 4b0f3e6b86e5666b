#!/usr/bin/env bash
# Test with several versions of torch, each in an environment of its own, and print a table:
#
#     ./scripts/test_torch.sh                       those whose environment exists: .venv-torch-*
#     ./scripts/test_torch.sh 2.11.0 2.15.0         these; installs them where they are missing
#
# Runs the tests that are not slow, and what trains on several ranks against one process.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

core=(tests/unit/test_gpu_check.py tests/unit/test_api.py tests/distributed/test_{step,pipeline,layouts,expert_loads}.py
    tests/distributed/test_{mistakes,optimizer_layouts,resume}.py)
logs=$(mktemp -d)

# tested NAME LOG ARGUMENT …: the last line of pytest
tested() {
    PYTHON=$python VENV=$venv ./scripts/test.sh "${@:2}" >"$logs/$1" 2>&1 || true
    tail -n 1 "$logs/$1"
}

versions=("$@")
if [[ $# == 0 ]]; then
    for folder in .venv-torch-*; do
        versions+=("${folder#.venv-torch-}")
    done
fi
for version in "${versions[@]}"; do
    venv=$PWD/.venv-torch-$version
    python=$venv/bin/python
    if [[ ! -x $python ]]; then
        "${PYTHON:-python3}" -m venv "$venv"
        "$python" -m pip install --quiet "torch==$version" --editable ".[report,test]"
    fi
    printf '| %s | %s | %s |\n' "$("$python" -c 'import torch; print(torch.__version__)')" \
        "$(tested "$version-quick" -m "not slow")" "$(tested "$version-core" "${core[@]}")"
done
echo "logs: $logs"
