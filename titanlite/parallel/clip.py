"""Global gradient norm, gradient clipping, and spikes of the norm, without a host read."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.models.family import copies_in, parameters_of
from titanlite.runtime.torch_internals import is_dtensor, norm_of_each, scale_all_

WINDOW = 128
"""Steps whose norms a spike is compared with."""
MIN_NORMS = 32
"""Known norms without which no step is a spike."""


Squares = Callable[[Sequence[Tensor | None]], tuple[Tensor, Tensor]]
"""See ExactGradients.squares."""


class GradNorm(NamedTuple):
    """Norms of the gradients before clipping, on the device.

    total: scalar in promote_types(gradient dtype, float32), over all ranks. of_shards: float64 (parameters,), this
    rank's shard of each gradient, in the order of the parameters; 0 for an absent or empty one.
    """

    total: Tensor
    of_shards: Tensor


@torch.no_grad()
def clip_grad_norm_(
    model_parts: Iterable[nn.Module],
    max_norm: float,
    pp_group: dist.ProcessGroup | None,
    squares: Squares | None = None,
) -> GradNorm:
    """Clip the gradients in place to a global 2-norm of at most `max_norm`; return the norms before clipping.

    model_parts: this rank's parts of the model; the ranks of `pp_group` have the other stages (None: no pipeline). A
    parameter that stages share counts on the first rank that has it; their gradients must be added up.
    The total is the same on all ranks. If `max_norm` <= 0, gradients are not clipped. One all-reduce per mesh axis
    reduces all parameters that are sharded over the same axes, and one over pp reduces the total; replicated parameters
    count once. squares: adds them up alike on all meshes; None: in an order that depends on the mesh.
    """
    # Group by parameters, not by gradients, so that all ranks issue the same collectives.
    model_parts = list(model_parts)
    named = {name: each for name, each in parameters_of(model_parts).items() if each.requires_grad}
    copies = set() if pp_group is None else copies_in(model_parts, pp_group.rank())
    parameters = list(named.values())
    device = parameters[0].device
    dtype = torch.float32
    sharded: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    gradients: dict[int, Tensor] = {}
    for index, (name, parameter) in enumerate(named.items()):
        dtype = torch.promote_types(dtype, parameter.dtype)
        indices = sharded.setdefault(_shard_groups(parameter), [])
        if parameter.grad is not None and (local := _local(parameter, parameter.grad)).numel():
            gradients[index] = local
            if name not in copies:
                indices.append(index)
    zero = torch.zeros((), dtype=torch.float64, device=device)
    if squares is not None:
        total, of_shards = squares([gradients.get(index) for index in range(len(parameters))])
        _scale(list(gradients.values()), norm := total.sqrt().to(dtype), max_norm)
        return GradNorm(norm, of_shards.sqrt())
    norms = dict(zip(gradients, _norms(list(gradients.values()), dtype), strict=True))
    parts = []
    for groups, indices in sharded.items():
        own = torch.stack([norms[index] for index in indices] or [zero])
        part = own.square().sum()
        for group in groups:
            dist.all_reduce(part, group=group)
        parts.append(part)
    total = torch.stack(parts).sum()
    if pp_group is not None and pp_group.size() > 1:
        dist.all_reduce(total, group=pp_group)
    norm = total.sqrt().to(dtype)
    _scale(list(gradients.values()), norm, max_norm)
    return GradNorm(norm, torch.stack([norms.get(index, zero) for index in range(len(parameters))]))


def _scale(gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients of this norm to one of at most `max_norm`."""
    if max_norm > 0 and gradients:
        scale_all_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))


def _norms(gradients: list[Tensor], dtype: torch.dtype) -> Iterable[Tensor]:
    """The norm of each gradient: float64 scalars.

    Squares are added within rows in `dtype`, then over rows in float64. A single sum over a tensor would be inexact on
    CPUs: torch adds the squares sequentially, with an error of 1e-5 after 10^6 float32 elements and 1e-2 after 10^8.
    """
    if not gradients:
        return []
    rows = [torch.linalg.vector_norm(gradient, dim=-1, dtype=dtype) for gradient in gradients]
    return norm_of_each(rows, torch.float64)


def _shard_groups(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Process groups of the mesh axes with more than one rank over which the parameter is sharded."""
    if not is_dtensor(parameter):
        return ()
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    )


def _local(parameter: Tensor, gradient: Tensor) -> Tensor:
    if not is_dtensor(gradient):
        return gradient
    assert is_dtensor(parameter)
    assert gradient.placements == parameter.placements, "the gradient is not reduced yet"
    return gradient.to_local()


class SpikeGate:
    """Compares each global gradient norm with the median of those of the last WINDOW steps. Never reads the device.

    factor: a norm above `factor` times the median is a spike. skips: whether such a step is skipped. norms: float64
    (WINDOW,), by step modulo WINDOW, -1 where unknown; saved in checkpoints, which have no NaN. The same on all ranks.
    """

    def __init__(self, factor: float, device: torch.device, *, skips: bool) -> None:
        self.factor = factor
        self.skips = skips
        self.norms = torch.full((WINDOW,), -1.0, dtype=torch.float64, device=device)

    def ratio(self, step: int, norm: Tensor) -> Tensor:
        """`norm` of this step relative to the median of earlier ones, 0 without a verdict; then keeps `norm`.

        float64 scalar. A norm that is 0 or not finite is not kept.
        """
        known = self.norms >= 0
        median = self.norms.where(known, torch.nan).nanmedian()
        ratio = torch.where((known.sum() >= MIN_NORMS) & (median > 0) & norm.isfinite(), norm / median, 0.0)
        self.norms[step % WINDOW] = torch.where(norm.isfinite() & (norm > 0), norm.to(torch.float64), -1.0)
        return ratio
