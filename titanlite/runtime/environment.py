"""Environment variables that bear on a run, as lines for its start, without secrets."""

import re
from collections.abc import Mapping

_NAMES = {
    "CUBLAS_WORKSPACE_CONFIG",
    "DEVICE",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "PYTHONHASHSEED",
    "TOKENIZERS_PARALLELISM",
}
_PREFIXES = ("CUDA_", "GLOO_", "HIP_", "NCCL_", "PYTORCH_", "RCCL_", "ROCR_", "TITANLITE_", "TORCH_")
_SECRET_NAME = re.compile(r"TOKEN(?!IZER)|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_SECRET_VALUE = re.compile(  # a URL with a user's name and password; a parameter that smells like its name
    r"://[^/]*@|\w*(token|key|secret|passw|credential|auth|sig)\w*=", re.IGNORECASE
)


def environment_lines(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """One line per variable of interest that is set: `NAME=value`, and what the run itself set or overrode.

    before: the environment as the user handed it over; now: as it stands after the run's own settings. Only an
    allow-list of names and prefixes is looked at; names that smell of a secret are left out, and so are values that do.
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


def _shown(value: str) -> str:
    """`value` on one line, unless it may hold a secret."""
    if _SECRET_VALUE.search(value):
        return "<hidden: may hold a secret>"
    return value if value.isprintable() else ascii(value)
