"""The [memory] section; memory use of this process and memory of its device."""

import os
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch

from titanlite.runtime.settings import Affects

GIB = 2**30
USABLE = 0.9
"""Share of device memory available to tensors. The rest is for the CUDA context, NCCL's buffers and fragmentation."""
OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryConfig:
    """The check of the planned memory, before any is allocated."""

    AFFECTS: ClassVar[Affects] = "nothing"

    check: Literal["refuse", "warn", "off"] = "refuse"
    """A run that certainly needs more than its device has (parameters, gradients, optimizer state, half of a
    microbatch's activations): refuse; or warn, and start. off: no check. A run whose estimated peak is above 90 % of
    the device is warned about, unless off."""


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
    """Return the total memory of the device (CUDA), or of the machine and at most the control group's limit (CPU)."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *control_group_limits()])


def control_group_limits() -> list[int]:
    """Return the memory limits of this process's control groups and those above them, versions 1 and 2 (Linux)."""
    limits = []
    for line in _text_of(OWN_CGROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):  # "": version 2
            group = Path(path.lstrip("/"))
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            texts = [_text_of(CGROUPS / controllers / folder / name).strip() for folder in (group, *group.parents)]
            limits += [int(text) for text in texts if text.isdecimal()]
    return limits


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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation has failed. On the CPU, torch raises a plain RuntimeError; pipelines wrap errors."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def describe_out_of_memory(error: BaseException) -> str:
    """One line about a failed allocation, where the plan of the run is unknown."""
    device = torch.device("cuda" if isinstance(error, torch.OutOfMemoryError) else "cpu")
    peak, has = peak_memory_bytes(device) / GIB, device_memory_bytes(device) / GIB
    first_line = f"{error}".partition("\n")[0] or type(error).__name__
    return (
        f"out of memory: peak {peak:.1f} GiB, the device has {has:.1f} GiB; titanlite plan CONFIG lists what the run "
        f"needs, and ulimit -v may set a lower limit ({first_line})"
    )


def _text_of(path: str | Path) -> str:
    """Return the file's text, "" if it does not exist."""
    return Path(path).read_text() if Path(path).exists() else ""
