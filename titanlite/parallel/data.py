"""Data parallelism: sharded (`fully_shard`), replicated (`replicate`), or both, and when gradients are reduced.

Gradients are plain sums over the data ranks: the loss is divided by the global number of valid tokens before
backward, so no reduction may divide again.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from titanlite.models.family import Plan
from titanlite.parallel.mesh import GradientSync, ReshardAfterForward
from titanlite.runtime.errors import UserError


def apply_data_parallel(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: ReshardAfterForward,
) -> list[str]:
    """Wraps the plan's units and then the root, in place; returns what was applied, for the start log.

    Mesh axes: dp_replicate and dp_shard. Both larger than 1: hybrid sharding; dp_shard alone: `fully_shard`; else
    `replicate`, also on a mesh of one rank, so that the mixed-precision policy is in force everywhere. Only a model
    on one data rank, whole and in one dtype, stays as it is: nothing is to be reduced or cast, and the wrapper's
    copies of gradients would cost 5 % of a step (docs/LOG.md).

    Computes in `param_dtype`, reduces gradients in `reduce_dtype`, as plain sums.
    """
    replicas, shards = mesh["dp_replicate"].size(), mesh["dp_shard"].size()
    whole = replicas * shards * mesh["tp"].size() == 1
    if whole and param_dtype == reduce_dtype == next(model.parameters()).dtype:
        return []
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    units = [[model.get_submodule(name) for name in unit] for unit in plan.units]
    if shards == 1:
        for unit in units:
            replicate(unit, mesh=mesh["dp_replicate"], mp_policy=policy)
        replicate(model, mesh=mesh["dp_replicate"], mp_policy=policy)
        applied = "replicate"
    else:
        data_mesh = mesh["dp_replicate", "dp_shard"] if replicas > 1 else mesh["dp_shard"]
        for index, unit in enumerate(units):
            is_last = index == len(units) - 1
            # The last unit is needed again at once by the backward pass: freeing it would only cost a gather.
            reshard = reshard_after_forward == "always" or (reshard_after_forward == "default" and not is_last)
            fully_shard(unit, mesh=data_mesh, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(model, mesh=data_mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward == "always")
        applied = "hybrid fully_shard" if replicas > 1 else "fully_shard"
    for module in wrapped_modules(model):
        # Plain sums on every backend. The factor alone fails on gloo, and the setters do not recurse.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        # A parameter without a gradient on this rank still takes part in the reduction.
        if hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True)
        elif plan.may_skip_parameters:
            raise UserError(
                f"torch {torch.__version__} cannot reduce gradients that are missing on some ranks, and this model may "
                "leave parameters without a gradient: use torch 2.13 or newer"
            )
    return [applied]


def resolve_gradient_sync(policy: GradientSync, mesh: DeviceMesh) -> GradientSync | None:
    """hybrid is a choice between the two data axes: without shards it is last, without replicas every.

    None with a pipeline: its stages reduce by themselves, once per schedule step.
    """
    if mesh["pp"].size() > 1:
        return None
    if policy != "hybrid":
        return policy
    if mesh["dp_shard"].size() == 1:
        return "last"
    return "every" if mesh["dp_replicate"].size() == 1 else "hybrid"


@contextmanager
def gradient_sync(model_parts: Iterable[nn.Module], policy: GradientSync | None, *, is_last: bool) -> Iterator[None]:
    """Whether the backward pass inside reduces its gradients over dp_shard and dp_replicate.

    every: both axes, always. last: both axes where `is_last` (the last microbatch of the step); until then the rank
    keeps its unreduced sums, and the gathered parameters. hybrid: dp_shard always, dp_replicate where `is_last`.
    All three give the same gradients. None: the pipeline decides, here nothing is set.
    """
    for root in (part for part in model_parts if policy is not None and isinstance(part, FSDPModule)):
        root.set_requires_gradient_sync(is_last or policy != "last")
        root.set_requires_all_reduce(is_last or policy == "every")
        root.set_reshard_after_backward(is_last or policy != "last")
        root.set_is_last_backward(is_last)
    yield


def wrapped_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """All modules that `fully_shard` or `replicate` wrapped, the root first."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def running_dtypes(model: nn.Module) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """(parameters, compute, gradient reduction), read off a model that `apply_data_parallel` has seen."""
    parameters = next(model.parameters()).dtype
    root = next(wrapped_modules(model), None)
    if root is None:
        return parameters, parameters, parameters
    policy = root._get_fsdp_state()._mp_policy
    compute = policy.param_dtype or parameters
    return parameters, compute, policy.reduce_dtype or compute
