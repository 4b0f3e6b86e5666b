"""Work that keeps a GPU busy for a time."""

import time
from functools import cache

import torch

from titanlite.runtime.torch_internals import occupy_gpu

_WARM, _TIMED = 3 * 10**8, 10**8


@cache
def cycles_per_s() -> float:
    """Measured, since GPUs change their clock."""
    occupy_gpu(_WARM)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    occupy_gpu(_TIMED)
    torch.cuda.synchronize()
    return _TIMED / (time.perf_counter() - begin)


def occupied(seconds: float) -> None:
    """Keep the current stream busy for about so long; the host does not wait, but for the first call in a process."""
    occupy_gpu(int(seconds * cycles_per_s()))
