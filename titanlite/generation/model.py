"""A model that is not parallelized: empty, or with the weights of a parallelized one."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.models.family import Family, LanguageModel, saved_tensors
from titanlite.models.layers import adopt_rotary_
from titanlite.parallel.mesh import Mesh
from titanlite.runtime.logging import REDISTRIBUTION
from titanlite.runtime.torch_internals import is_dtensor


def empty_model(family: Family, hyper_parameters: Any, device: torch.device, dtype: torch.dtype) -> LanguageModel:
    """The full model, with initialized buffers and uninitialized parameters."""
    with torch.device("meta"):
        model = family.build(hyper_parameters).to(dtype)
    model.tie_weights()
    model.to_empty(device=device)
    model.tie_weights()
    model.init_buffers(device)
    return model


def gather_model(
    model_parts: Sequence[LanguageModel], mesh: Mesh, family: Family, hyper_parameters: Any, dtype: torch.dtype
) -> LanguageModel | None:
    """The full model with the current weights on rank 0, in `dtype`; None on other ranks. A collective over all ranks.

    model_parts: the parallelized parts of this rank, with sharded parameters, between steps. One parameter at a time
    is gathered, first over dp_shard and tp, then from its pipeline rank to rank 0.
    """
    REDISTRIBUTION.setLevel(logging.ERROR)
    device = mesh.world.device
    is_first = mesh.world.rank == 0
    with torch.device("meta"):
        full = family.build(hyper_parameters)
    full.tie_weights()
    shapes = {name: tensor.shape for name, tensor in saved_tensors(full).items()}
    dtypes = dict.fromkeys(shapes, torch.float32) | {name: dtype for name, _ in full.named_parameters()}
    model = empty_model(family, hyper_parameters, device, dtype) if is_first else None
    if model is not None:
        adopt_rotary_(model, model_parts[0])  # a training stage may have changed them
    targets = saved_tensors(model) if model is not None else {}
    own = {name: tensor for part in model_parts for name, tensor in saved_tensors(part).items()}
    group = mesh.group("pp")
    pp_rank, sends = mesh.coordinate["pp"], mesh.is_first(axis for axis in mesh.coordinate if axis != "pp")
    for name, owner in _owners(own, group).items():
        value = _full(own[name]) if pp_rank == owner else None
        if not sends:
            continue
        if owner and pp_rank == owner:
            assert value is not None
            dist.send(value.to(dtypes[name]).contiguous(), group=group, group_dst=0)
        elif pp_rank == 0:
            if owner:
                value = torch.empty(shapes[name], dtype=dtypes[name], device=device)
                dist.recv(value, group=group, group_src=owner)
            if is_first:
                assert value is not None
                with torch.no_grad():
                    targets[name].copy_(value)
    return model


def _owners(own: Mapping[str, Tensor], group: dist.ProcessGroup) -> dict[str, int]:
    """Name -> pipeline rank, of all parameters, in the same order on all ranks of the pipeline."""
    names: list[Any] = [None] * group.size()
    dist.all_gather_object(names, list(own), group=group)
    return {name: rank for rank, of_rank in enumerate(names) for name in of_rank}


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if is_dtensor(tensor) else tensor
