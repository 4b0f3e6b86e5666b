"""End a rank whose launcher has ended: the next attempt may already use the same folders.

Does not import torch, which takes seconds, so that it also works during that import.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

WATCH_S = 1.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_launcher() -> None:
    """Kill this process as soon as the torchrun that started it has ended, even by SIGKILL. Idempotent.

    torchrun starts each rank in a new session, so ranks would outlive it. Without torchrun this does nothing: the
    process may outlive its shell.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if sys.platform == "linux" and _kernel_kills_with_parent():
        if _adopted_by_init():
            _end()
    else:
        threading.Thread(target=_watch, args=(os.getppid(),), name="titanlite-launcher", daemon=True).start()


def _kernel_kills_with_parent() -> bool:
    return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0)


def _adopted_by_init() -> bool:
    """Whether the launcher ended before prctl was called. In a container, torchrun itself may be process 1."""
    try:
        return os.getppid() == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes()
    except OSError:  # no /proc
        return False


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(WATCH_S)
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
