"""Stochastic rounding that is the same on every mesh.

A value between two neighbors in bfloat16 becomes the upper one with a probability equal to its distance from the lower
one (Gupta et al., "Deep Learning with Limited Numerical Precision", 2015), so that it is right on average.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from titanlite.models.randomness import words

CHUNK = 2**20
"""Elements rounded at once: their random numbers need several tensors of 8 bytes per element."""


def rounding_bytes(elements: int) -> int:
    """Peak bytes of `round_to_bfloat16`: its result, and five tensors of 8 bytes per element of a chunk."""
    return 2 * elements + 40 * min(elements, CHUNK)


def round_to_bfloat16(
    values: Tensor, seed: int, step: Tensor, name: str, shape: Sequence[int], offset: Sequence[int]
) -> Tensor:
    """Round the box at `offset` of a tensor of `shape`, with a random number per (seed, step, name, element).

    values: float32; float64 is rounded to float32 first. step: integral scalar on the device of `values`.
    """
    rounded = torch.empty(values.numel(), dtype=torch.bfloat16, device=values.device)
    flat = values.reshape(-1)
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK].to(torch.float32)
        elements = _global_indexes(start, len(part), values.shape, shape, offset, values.device)
        draws = words(seed, step, name, elements).bitwise_and(0xFFFF).to(torch.int32)
        # bfloat16 is the upper half of float32: adding 16 random bits carries over with the right probability
        bits = (part.view(torch.int32) + draws).bitwise_and(-0x10000)
        rounded[start : start + CHUNK] = bits.view(torch.float32).to(torch.bfloat16)
    return rounded.view(values.shape)


def _global_indexes(
    start: int, count: int, box: Sequence[int], shape: Sequence[int], offset: Sequence[int], device: torch.device
) -> Tensor:
    """Indexes in the flattened tensor of `shape` of elements [start, start + count) of the flattened box."""
    rest = torch.arange(start, start + count, device=device)
    found, stride = torch.zeros_like(rest), 1
    for size, full, first in zip(reversed(box), reversed(shape), reversed(offset), strict=True):
        found += (rest % size + first) * stride
        rest, stride = rest // size, stride * full
    return found
