"""Parts that the benchmarks share."""

import os
import statistics
from collections.abc import Sequence


def spread(values: Sequence[float], form: str) -> str:
    """Median (minimum to maximum), each in the given format."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def threads_per_process(processes: int) -> int:
    return max(1, (os.cpu_count() or 1) // processes)
