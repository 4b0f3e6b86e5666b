"""Memory use of this process and memory of its device."""

import os
import re
import resource
import sys
from pathlib import Path

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process so far.

    CUDA: reserved by torch's allocator on the device. CPU: resident set of the process. Reads counters on the host, so
    it does not sync with the device.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    # VmHWM is preferred: in a forked process, ru_maxrss starts at the parent's size.
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss counts bytes on macOS, KiB elsewhere
    return _bytes_in("/proc/self/status", "VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_memory_bytes(device: torch.device) -> int:
    """Return the total memory of the device (CUDA) or of the machine (CPU)."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory_bytes() -> int:
    """Return the available memory of this machine, at most that of its control group (Linux)."""
    available = _bytes_in("/proc/meminfo", "MemAvailable")
    free = device_memory_bytes(torch.device("cpu")) if available is None else available
    limit, used = (_text_of(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    return min(free, int(limit) - int(used)) if limit.isdecimal() and used.isdecimal() else free


def _bytes_in(path: str, key: str) -> int | None:
    """Value of the line "<key>: <number> kB" of a file in /proc; None if it is missing."""
    found = re.search(rf"^{key}:\s*(\d+) kB$", _text_of(path), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _text_of(path: str) -> str:
    """Return the file's text, "" if it does not exist."""
    return Path(path).read_text() if Path(path).exists() else ""
