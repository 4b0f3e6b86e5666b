"""A schedule: cosine decay with warm restarts, four times.

Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017. Use it with

    [job]
    plugins = ["schedule.py"]
    [lr_schedule]
    decay = "restarts"
"""

import math

import titanlite

CYCLES = 4


def restarts(progress: float) -> float:
    """Position between the peak learning rate (0) and the smallest one (1), by the completed fraction of the decay."""
    if progress == 1.0:
        return 1.0
    return 0.5 * (1.0 - math.cos(math.pi * (CYCLES * progress % 1.0)))


titanlite.register_schedule("restarts", restarts)
