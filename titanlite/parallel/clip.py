"""The global gradient norm, and clipping to it, without a host read."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm_(model_parts: Iterable[nn.Module], max_norm: float) -> Tensor:
    """The 2-norm of all gradients before clipping; scales the gradients in place so that it is at most `max_norm`.

    Returns a scalar on the device in promote_types(gradient dtype, float32), the same on all ranks. `max_norm` <= 0
    only measures. Each group of parameters that are sharded over the same mesh axes is summed by one all-reduce for
    each such axis; replicated parameters are counted once.
    """
    # Parameters decide on the groups, not gradients: all ranks then issue the same collectives.
    parameters = [p for part in model_parts for p in part.parameters() if p.requires_grad]
    device = parameters[0].device
    dtype = torch.float32
    sharded: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for parameter in parameters:
        dtype = torch.promote_types(dtype, parameter.dtype)
        gradients = sharded.setdefault(_shard_groups(parameter), [])
        if parameter.grad is not None:
            gradients.append(_local(parameter.grad))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for groups, gradients in sharded.items():
        square = _square_sum(gradients, dtype) if gradients else torch.zeros_like(total)
        for group in groups:
            dist.all_reduce(square, group=group)
        total += square
    norm = total.sqrt().to(dtype)
    if max_norm > 0:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradients in sharded.values():
            if gradients:
                torch._foreach_mul_(gradients, scale)
    return norm


def _square_sum(gradients: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Sum of all squares, a float64 scalar: rows in `dtype`, then over rows in float64.

    A whole tensor at once would do on no CPU: torch adds its squares one after the other, and is off by 1e-5 after
    10^6 float32 elements, by 1e-2 after 10^8 (docs/LOG.md).
    """
    rows = [torch.linalg.vector_norm(gradient, dim=-1, dtype=dtype) for gradient in gradients]
    return torch.stack(torch._foreach_norm(rows, 2, dtype=torch.float64)).square().sum()


def _shard_groups(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Process groups of the mesh axes, larger than 1, over which the parameter is sharded."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    )


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
