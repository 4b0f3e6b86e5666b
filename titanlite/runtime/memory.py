"""How much memory this process takes where its model lives."""

import os
import re
import resource
import sys
from pathlib import Path

import torch

_PEAK_RESIDENT = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process has held so far, of the kind that the device can run out of.

    CUDA: what torch's allocator has reserved on the device. CPU: the process's resident set.
    The device is not asked: these are counters on the host.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    # The kernel's own line first: ru_maxrss starts at the parent's size in a process that was forked.
    status = Path("/proc/self/status")
    found = _PEAK_RESIDENT.search(status.read_text()) if status.exists() else None
    if found:
        return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss counts bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_memory_bytes(device: torch.device) -> int:
    """All the memory that the device has (CUDA), or the machine (CPU)."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory_bytes() -> int:
    """What processes can still take of this machine's memory, and of what its control group may take (Linux)."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", _text_of("/proc/meminfo"), re.MULTILINE)
    free = int(found[1]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, used = (_text_of(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    return min(free, int(limit) - int(used)) if limit.isdecimal() and used.isdecimal() else free


def _text_of(path: str) -> str:
    """Nothing where there is no such file."""
    return Path(path).read_text() if Path(path).exists() else ""
