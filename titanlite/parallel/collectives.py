"""Functional collectives, which compiled blocks and the recompute policies know."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from titanlite.runtime.torch_internals import functional_collectives

_operations = functional_collectives()


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `x` over the ranks."""
    return _waited(_operations.all_reduce(x, "sum", group.group_name))


def all_maximum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The elementwise maximum of `x` over the ranks."""
    return _waited(_operations.all_reduce(x, "max", group.group_name))


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks, joined along the first dimension."""
    return _waited(_operations.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part, along the first dimension, of the sum of `x` over the ranks."""
    return _waited(_operations.reduce_scatter_tensor(x, "sum", group.size(), group.group_name))


def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The rows that all ranks have for this one, in their order. sent, received: numbers of rows for and from
    each rank."""
    return _waited(_operations.all_to_all_single(x.contiguous(), received, sent, group.group_name))


def _waited(x: Tensor) -> Tensor:
    waited: Tensor = _operations.wait_tensor(x)
    return waited
