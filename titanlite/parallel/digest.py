"""The digest of tensors: a number that changes with any of their bits, and does not depend on how they are sharded.

The bits of each element, as an integer, are multiplied by an odd number that its place in the global tensor determines,
and added up modulo 2^64, which is exact in any order. The digest of named tensors is a hash of these sums. Two digests
are different if a single element differs; if many do, they are the same by chance once in 2^64 cases.
"""

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from titanlite.models.init import local_region
from titanlite.parallel.exact import ExactGradients

_AT_ONCE = 2**22
"""Elements of which copies exist at a time."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weights_digest(exact: ExactGradients) -> str:
    """The digest of the weights of a run after its last step, the same on all meshes. A collective; waits for the
    device. Computed once per step, also if it is logged and saved."""
    if exact.digest is None:
        totals = exact.totals({name: sum_of_bits(*local_region(each)) for name, each in exact.parameters.items()})
        exact.digest = combine(exact.names, totals.tolist())
    return exact.digest


def sum_of_bits(local: Tensor, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    """int64 scalar, of this part of a tensor; those of all parts add up to that of the tensor.

    local: the box at `offset` of a tensor of `shape`.
    """
    columns, total = local.shape[-1] if local.dim() else 1, torch.zeros((), dtype=torch.int64, device=local.device)
    if not local.numel():
        return total
    of_columns = _odd(torch.arange(columns, device=local.device) + (offset[-1] if offset else 0), 1)
    numbers = torch.zeros((), dtype=torch.int64, device=local.device)
    for dim, begin in enumerate(offset[:-1]):
        places = torch.arange(begin, begin + local.shape[dim], device=local.device)
        numbers = numbers.unsqueeze(-1) * shape[dim] + places
    of_rows = _odd(numbers.flatten(), 2)
    bits = local.detach().contiguous().view(_INTEGERS[local.element_size()]).view(-1, columns)
    rows_at_once = max(1, _AT_ONCE // columns)
    for part, factors in zip(bits.split(rows_at_once), of_rows.split(rows_at_once), strict=True):
        total += ((part.to(torch.int64) * of_columns).sum(-1) * factors).sum()
    return total


def combine(names: Iterable[str], sums: Iterable[int]) -> str:
    """The digest of tensors, 16 hexadecimal digits. sums: see sum_of_bits."""
    lines = (f"{name} {value % 2**64:016x}\n" for name, value in sorted(zip(names, sums, strict=True)))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def _odd(numbers: Tensor, seed: int) -> Tensor:
    """A pseudo-random odd int64 for each number, by the mixing function of splitmix64 (Steele, Lea, Flood, 2014)."""
    mixed = (numbers + seed * 0x1000003) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        unsigned = (mixed >> shift) & (2 ** (64 - shift) - 1)
        mixed = (mixed ^ unsigned) * _signed(factor)
    return torch.bitwise_or(mixed, 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
