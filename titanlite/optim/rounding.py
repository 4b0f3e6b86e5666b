"""Stochastic rounding that is the same on every mesh.

A value between two neighbors in bfloat16 becomes the upper one with a probability equal to its distance from the lower
one (Gupta et al., "Deep Learning with Limited Numerical Precision", 2015), so that it is right on average.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from titanlite.models.randomness import words

CHUNKS = {"cpu": 2**16}
"""Elements rounded at once, by device: their random numbers need several tensors of 8 bytes per element, which fit
into a CPU's cache."""
CHUNK = 2**22
"""Elements at once on other devices."""


def rounding_bytes(elements: int) -> int:
    """Most bytes of `round_to_bfloat16` for two tensors: its results, and five tensors of 8 bytes per element of a
    chunk."""
    return 4 * elements + 40 * min(elements, CHUNK)


def round_to_bfloat16(
    tensors: Sequence[Tensor], seed: int, step: Tensor, name: str, shape: Sequence[int], offset: Sequence[int]
) -> list[Tensor]:
    """Round up to four tensors, each the box at `offset` of one of `shape`.

    Draws a word for each (seed, step, name, element of the full tensor), of which each tensor uses 16 bits. tensors:
    float32; float64 is rounded to float32 first. step: integral scalar on their device.
    """
    first = tensors[0]
    rounded = [torch.empty(first.numel(), dtype=torch.bfloat16, device=first.device) for _ in tensors]
    flat = [tensor.reshape(-1) for tensor in tensors]
    start = 0
    for elements in _global_indexes(first.shape, shape, offset, first.device):
        part = slice(start, start + len(elements))
        drawn = words(seed, step, name, elements)
        for number, (values, result) in enumerate(zip(flat, rounded, strict=True)):
            draws = drawn.bitwise_right_shift(16 * number).bitwise_and(0xFFFF).to(torch.int32)
            # bfloat16 is the upper half of float32: adding 16 random bits carries over with the right probability
            bits = draws.add_(values[part].to(torch.float32).view(torch.int32)).bitwise_and_(-0x10000)
            result[part] = bits.view(torch.float32)
        start += len(elements)
    return [each.view(first.shape) for each in rounded]


def _global_indexes(
    box: Sequence[int], shape: Sequence[int], offset: Sequence[int], device: torch.device
) -> Iterator[Tensor]:
    """Indexes in the flattened tensor of `shape` of the elements of the box, in order, some rows at a time."""
    indexes = torch.zeros(1, dtype=torch.int64, device=device)
    for size, full, first in zip(box[:-1], shape[:-1], offset[:-1], strict=True):
        indexes = (indexes[:, None] * full + torch.arange(first, first + size, device=device)).view(-1)
    columns = torch.arange(offset[-1], offset[-1] + box[-1], device=device)
    for rows in (indexes * shape[-1]).split(max(CHUNKS.get(device.type, CHUNK) // max(box[-1], 1), 1)):
        for some in columns.split(CHUNKS.get(device.type, CHUNK)):
            yield (rows[:, None] + some).view(-1)
