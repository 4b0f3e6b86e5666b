"""The order in which parallelisms are applied to a model, written once for all families."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.models.family import Plan
from titanlite.parallel.data import apply_data_parallel
from titanlite.parallel.mesh import ReshardAfterForward


def parallelize(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: ReshardAfterForward,
) -> list[str]:
    """Applies to the model, in place and on the meta device, what the mesh asks for, by the names in the family's plan.

    Computes in `param_dtype`, reduces gradients in `reduce_dtype`. Returns what was applied, in order,
    for the start log.
    """
    return apply_data_parallel(
        model,
        plan,
        mesh,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        reshard_after_forward=reshard_after_forward,
    )
