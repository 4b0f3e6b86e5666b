"""Parameters that pipeline stages share, such as tied embeddings: ranks with such stages have copies of them.

Copies start equal, get the same gradient, the sum of those of all stages, and are updated alike. Stages on the same
rank have one parameter.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.models.family import LanguageModel, parameters_of
from titanlite.runtime.dtensors import local_part
from titanlite.runtime.torch_internals import share_parameter


class SharedParameters:
    """The parameters of this rank of which other ranks have copies. A collective over `group`, the ranks of the pp
    axis."""

    def __init__(self, model_parts: Sequence[LanguageModel], group: dist.ProcessGroup) -> None:
        self._group = group
        parameters, holders = parameters_of(model_parts), holders_in(model_parts)
        self._copied = [(parameters[name], ranks) for name, ranks in holders.items() if len(ranks) > 1]
        # NCCL: the first call in a group must be one of all its ranks, and some may have no copy.
        dist.all_reduce(torch.zeros((), device=next(iter(parameters.values())).device), group=group)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Replace each gradient by the sum of those of all copies: the same bits on all ranks. Sends each gradient to
        each of the others, in the dtype of the parameter; adds them in at least float32."""
        for parameter, ranks in self._copied:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own = local_part(parameter.grad)
            first, *others = exchanged(own, ranks, self._group)
            total = first.to(torch.promote_types(own.dtype, torch.float32), copy=True)
            for each in others:
                total += each
            own.copy_(total)


def holders_in(model_parts: Sequence[nn.Module]) -> dict[str, tuple[int, ...]]:
    """LanguageModel.holders of a rank's parts of the model."""
    return {name: ranks for part in model_parts for name, ranks in getattr(part, "holders", {}).items()}


def exchanged(own: Tensor, ranks: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    """The tensors of these ranks of the group, in their order. All of them call it, each with its own tensor."""
    own = own.contiguous()
    found = [own if rank == group.rank() else torch.empty_like(own) for rank in ranks]
    messages = [
        dist.P2POp(operation, tensor, group=group, group_peer=rank)
        for rank, received in zip(ranks, found, strict=True)
        if rank != group.rank() and own.numel()
        for operation, tensor in ((dist.isend, own), (dist.irecv, received))
    ]
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()
    return found


def share_between(model_parts: Sequence[LanguageModel]) -> None:
    """Make parameters that stages of this rank share one parameter. Call it when memory is allocated."""
    first: dict[str, tuple[LanguageModel, str]] = {}
    for part in model_parts:
        own_names = {name: own for own, name in part.first_names.items()}
        for name in part.holders:
            own = own_names.get(name, name)
            if name in first:
                share_parameter(*first[name], part, own)
                part.tie_weights()  # a stage may have it under several names
            first.setdefault(name, (part, own))
