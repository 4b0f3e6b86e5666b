"""Processes beside the one that trains or tokenizes: plain ones, which import no torch and end with a pipe."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import titanlite


def start_process(module: str, *arguments: str, **settings: Any) -> subprocess.Popen[bytes]:
    """`python -m module arguments` with this very titanlite. settings: of Popen.

    One core each: several threads for each of several processes would only compete.
    """
    paths = [str(Path(titanlite.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "RAYON_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", module, *arguments], env=environment, **settings)


def describe_exit(code: int) -> str:
    """What an exit code says: killed by which signal, or ended by itself."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
