"""Environment of a process: the limit of open files, facts of the system, home folders, variables without secrets."""

import os
import re
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from titanlite.runtime.errors import UserError

OPEN_FILES = 65_536

CHOSE_THREADS = "TITANLITE_CHOSE_THREADS"
"""Set if the launcher of run_train.sh, not the user, has set OMP_NUM_THREADS."""

_NAMES = {
    "CUBLAS_WORKSPACE_CONFIG",
    "DEVICE",
    "GOMP_SPINCOUNT",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "PYTHONHASHSEED",
    "TOKENIZERS_PARALLELISM",
}
_PREFIXES = ("CUDA_", "GLOO_", "HIP_", "NCCL_", "PYTORCH_", "RCCL_", "ROCR_", "TITANLITE_", "TORCH_")
_SECRET_NAME = re.compile(r"TOKEN(?!IZER)|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_SECRET_VALUE = re.compile(  # a URL with user and password, or a parameter named like a secret
    r"://[^/]*@|\w*(token|key|secret|passw|credential|auth|sig)\w*=", re.IGNORECASE
)


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files of this process and its children to OPEN_FILES, or the hard limit if lower.

    The usual soft limit of 1,024 is too low for the store of rank 0, with a connection to each rank.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(ValueError, OSError):  # macOS has another limit below the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def safe_imports() -> dict[str, str]:
    """Variables with which a Python process imports nothing from its current folder, which `python -m` has first on its
    path. This titanlite is still found if it is in that folder.

    Plugins that are modules of the current folder are found, too: runtime.plugins adds the folder, at the end.
    """
    folder = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    return {"PYTHONSAFEPATH": "1"} | ({"PYTHONPATH": paths} if folder == os.getcwd() else {})


def usable_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def chooses_threads(environment: Mapping[str, str]) -> bool:
    """Whether the user has given the number of threads of a process. environment: at program start."""
    return "OMP_NUM_THREADS" in environment and CHOSE_THREADS not in environment


def read_system(path: str) -> str:
    """Target of a link or content of a file in /proc or /sys; "" if the system lacks it."""
    try:
        return os.readlink(path) if os.path.islink(path) else Path(path).read_text().strip()
    except OSError:
        return ""


def expand_home(path: str | os.PathLike[str]) -> str:
    """The path with ~ or ~USER at its start, also behind "hf:", as that home folder. Raises UserError, also for a part
    of the path that is an environment variable."""
    prefix, rest = re.fullmatch("(hf:)?(.*)", os.fspath(path), re.DOTALL).groups("")  # type: ignore[union-attr]
    expanded = os.path.expanduser(rest)
    if expanded.startswith("~"):
        raise UserError(f"{path}: this home folder is unknown: write the path without ~")
    if found := re.search(r"(?:^|/)(\$\w+|\$\{\w+\})(?:/|$)", rest):
        raise UserError(f"{path}: {found[1]} in a path is not replaced: write its value")
    return prefix + expanded


def environment_lines(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return one line per variable: `NAME=value`, and whether titanlite set, overrode or removed it.

    before: the user's environment; now: the environment after the run's own settings. Only an allow-list of names and
    prefixes is considered. Names that look like secrets are left out, and values that do are hidden.
    """
    lines = []
    for name in sorted({*before, *now}):
        if not (name in _NAMES or name.startswith(_PREFIXES)) or _SECRET_NAME.search(name):
            continue
        old, new = before.get(name), now.get(name)
        if new is None:
            lines.append(f"{name} removed (was {_shown(str(old))})")
        elif old is None:
            lines.append(f"{name}={_shown(new)} (set by titanlite)")
        elif old != new:
            lines.append(f"{name}={_shown(new)} (overridden by titanlite; was {_shown(old)})")
        else:
            lines.append(f"{name}={_shown(new)}")
    return lines


def overridden(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The lines of `environment_lines` about variables that the user has set and titanlite has changed or removed."""
    changed = {name: value for name, value in before.items() if now.get(name) != value}
    return environment_lines(changed, {name: now[name] for name in changed if name in now})


def _shown(value: str) -> str:
    """Return `value` on one line, or a placeholder if it may contain a secret."""
    if _SECRET_VALUE.search(value):
        return "<hidden: may contain a secret>"
    return value if value.isprintable() else ascii(value)
