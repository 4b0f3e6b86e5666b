# shellcheck shell=bash
# Find or create the Python environment. Sourced by run_train.sh, scripts/test.sh and .ci/run, under `set -euo pipefail`.
# Sets `repo`, this checkout; `use_environment [EXTRA …]` then sets `python`. Does not change the current folder.
# `venv` is .venv, or the path in the variable VENV. "$venv.incomplete" exists until the venv is complete.

repo=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
venv=${VENV:-$repo/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv
tested=(3.11 3.12 3.13 3.14) # newer Pythons may work, if all dependencies have wheels for them

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() {
    say "$@"
    exit 1
}

# check INTERPRETER QUESTION [ARGUMENT …]: run scripts/check_environment.py with that Python
check() {
    local interpreter=$1
    shift
    "$interpreter" "$repo/scripts/check_environment.py" "$@"
}

# Set `active` to the path of the active Python ($PYTHON, else python3, else python), and `untested` to a remark or "".
find_active_python() {
    local names=(python3 python) name version found=""
    untested=""
    [[ -z ${PYTHON:-} ]] || names=("$PYTHON")
    for name in "${names[@]}"; do
        version=$("$name" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        if [[ $version =~ ^3\.(1[1-9]|[2-9][0-9])$ ]]; then
            active=$(command -v "$name")
            [[ $active == /* ]] || active=$PWD/$active
            [[ " ${tested[*]} " == *" $version "* ]] ||
                untested="Python $version is untested: if it fails, delete ${venv##*/} and set PYTHON to one of ${tested[*]}"
            return
        fi
        found=${found:-$name is Python $version}
    done
    die "Python 3.11 or newer is needed, but ${found:-nothing runs as ${PYTHON:-python3 or python}}:" \
        "install one, or set its path: PYTHON=/path/to/python3 $0"
}

# Set `python` to one with all dependencies: the active one, else that of `venv`, which is created or completed.
use_environment() {
    local missing
    find_active_python
    python=$active
    missing=$(check "$python" missing "$@")
    if [[ -n $missing ]]; then
        python=$venv/bin/python
        if ! venv_is_complete "$@"; then
            one_at_a_time
            venv_is_complete "$@" || set_up_venv "$missing" "$@"
            exec 9<&-
        elif [[ -n ${PYTHON:-} ]]; then
            say "PYTHON=$PYTHON lacks ${missing//$'\n'/, }: using ${venv##*/}"
        fi
    fi
    # The active Python needs no change of PATH
    [[ $python == "$active" && -z ${PYTHON:-} ]] || PATH=$(dirname "$python"):$PATH
    export PATH
}

venv_is_complete() {
    [[ ! -e $venv.incomplete && -x $venv/bin/python ]] && [[ -z $(check "$venv/bin/python" missing "$@" 2>&1 || echo all) ]]
}

# Lock the checkout's folder if flock is available: the second of two simultaneous starts waits for the first.
one_at_a_time() {
    exec 9<"$repo"
    if command -v flock >/dev/null && ! flock -n 9; then
        say "another process is setting up ${venv##*/}: waiting for it"
        flock 9 || true
    fi
}

# set_up_venv MISSING [EXTRA …]
set_up_venv() {
    local missing=${1//$'\n'/, } extras
    shift
    extras=$(IFS=, && printf '%s' "$*")
    local torch=()
    local own="to use your own environment instead, activate it and run: pip install -e '$repo${extras:+[$extras]}'"
    if [[ -e $venv.incomplete || ! -e $venv ]]; then
        say "$active lacks $missing: creating ${venv##*/} for them ($own)"
        [[ -z $untested ]] || say "$untested"
        create_venv
    elif [[ -x $python ]]; then
        say "$active lacks $missing: completing ${venv##*/} ($own)"
    else
        die "$venv has no working Python: delete it, and start again"
    fi
    "$python" -P -m pip --version >/dev/null 2>&1 || "$python" -P -m ensurepip >&2 || die "$venv has no pip: install it there"
    # A torch that is there stays; else the version that development uses, not the newest
    [[ -n $(check "$python" torch-folder) ]] || torch=(--constraint scripts/constraints.txt)
    (cd "$repo" && "$python" -P -m pip install --disable-pip-version-check "${torch[@]}" --editable ".[report${extras:+,$extras}]") >&2 ||
        die "pip could not install titanlite into ${venv##*/}, see the error above: fix it, and start again${untested:+. $untested}"
    make_torchrun
    missing=$(check "$python" missing "$@")
    [[ -z $missing ]] || die "$venv still lacks ${missing//$'\n'/, }: delete it, and start again"
    rm -f "$venv.incomplete"
}

create_venv() {
    local package torch_folder
    package=$("$active" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    "$active" -P -c 'import venv, ensurepip' 2>/dev/null ||
        die "$active has no venv module: install it (Debian, Ubuntu: apt install $package), and start again"
    : >"$venv.incomplete"
    "$active" -P -m venv --clear "$venv" >&2 || die "$active could not create $venv: see the error above"
    # If the active Python has torch, add its folder to the path of the new one, so that pip treats it as installed
    torch_folder=$(check "$active" torch-folder)
    if [[ -n $torch_folder ]]; then
        say "keeping the torch in $torch_folder"
        printf '%s\n' "$torch_folder" >"$("$python" -P -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch_folder.pth"
    fi
}

# pip creates no torchrun for a torch in another folder, and the torchrun of a moved .venv calls the old Python
make_torchrun() {
    grep -qsF "$venv/bin/" "$venv/bin/torchrun" && return
    # shellcheck disable=SC2016 # expanded by the shell that runs torchrun
    printf '#!/bin/sh\nexec "${0%%/*}/python" -m torch.distributed.run "$@"\n' >"$venv/bin/torchrun"
    chmod +x "$venv/bin/torchrun"
}
