"""Time of device work: CUDA events on a GPU, the clock of the host on a CPU."""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch

from gpu_checks.workload import Setup


class Marks:
    """Points in time on the device's own clock, without waiting for it."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def add(self) -> None:
        if self._setup.device_type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds between one mark and the next. Waits for the device."""
        self._setup.synchronize()
        on_device = [before.elapsed_time(after) / 1000 for before, after in pairwise(self._events)]
        return on_device or [after - before for before, after in pairwise(self._times)]


def median_seconds(setup: Setup, work: Callable[[], object], repeats: int) -> float:
    """Median time of the work, after three calls that do not count."""
    for _ in range(3):
        work()
    marks = Marks(setup)
    marks.add()
    for _ in range(repeats):
        work()
        marks.add()
    return statistics.median(marks.seconds())


def matmul_flops(setup: Setup) -> float:
    """FLOP/s of a bfloat16 product of random matrices of 8192 x 8192 (tiny: 256 x 256)."""
    size = 256 if setup.tiny else 8192
    left, right = (torch.randn(size, size, device=setup.device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / median_seconds(setup, lambda: left @ right, 5 if setup.tiny else 30)
