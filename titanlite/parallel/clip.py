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
    dtype = torch.float32
    for parameter in parameters:
        dtype = torch.promote_types(dtype, parameter.dtype)
    device = parameters[0].device
    sharded: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for parameter in parameters:
        gradients = sharded.setdefault(_shard_groups(parameter), [])
        if parameter.grad is not None:
            gradients.append(_local(parameter.grad))
    total = torch.zeros((), dtype=dtype, device=device)
    for groups, gradients in sharded.items():
        norms = list(torch._foreach_norm(gradients, 2, dtype=dtype)) if gradients else []
        squares = torch.stack(norms).square().sum() if norms else torch.zeros_like(total)
        for group in groups:
            dist.all_reduce(squares, group=group)
        total += squares
    norm = total.sqrt()
    if max_norm > 0:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradients in sharded.values():
            if gradients:
                torch._foreach_mul_(gradients, scale)
    return norm


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
