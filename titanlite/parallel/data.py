"""Data parallelism: sharded (`fully_shard`), replicated (`replicate`) or hybrid, and gradient synchronization.

Gradients are plain sums over the data ranks: the loss is divided by the global number of valid tokens before
backward, so reductions must not divide again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from titanlite.models.experts import Experts
from titanlite.models.family import Structure
from titanlite.parallel.mesh import GradientSync, ModelDtypes, ReshardAfterForward
from titanlite.runtime.torch_internals import local_part, mixed_precision_policy, replicate, shards_on_demand

AT_ONCE_BYTES = 256 * 2**20


def apply_data_parallel(
    model: nn.Module,
    structure: Structure,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    dtypes: ModelDtypes,
    reshard_after_forward: ReshardAfterForward,
    *,
    keeps_sums: bool = False,
) -> list[str]:
    """Wrap the structure's FSDP units and then the root, in place; return descriptions for the start log.

    Mesh axes: dp_replicate and dp_shard. Both larger than 1: hybrid sharding; dp_shard alone: `fully_shard`; else
    `replicate`. The experts of a unit are wrapped separately if they are sharded over ep: over dp_replicate and
    expert_shard of `expert_mesh`. If dp_replicate, dp_shard and tp are 1, there is nothing to reduce, and `replicate`
    would copy each gradient several times (docs/LOG.md): the model is not wrapped, and its parameters are cast if
    necessary. Exceptions are reductions in another dtype than the parameters', in which gradients accumulate, and a
    pipeline with casts: each microbatch in flight would keep its own cast parameters. keeps_sums: what is reduced over
    dp_shard can be added in the dtype of reductions until it is reduced over dp_replicate, also if this has one rank.
    """
    replicas, shards = mesh["dp_replicate"].size(), mesh["dp_shard"].size()
    if not is_wrapped(replicas * shards * mesh["tp"].size(), mesh["pp"].size(), dtypes):
        if dtypes.compute == dtypes.parameters:
            return []
        cast_parameters(model, dtypes.compute)
        return [f"a cast of parameters to {dtypes.compute}"]
    # Inputs have the right dtypes already. A cast would narrow what is wider on purpose: masks, weights of experts.
    policy = MixedPrecisionPolicy(param_dtype=dtypes.compute, reduce_dtype=dtypes.reduction, cast_forward_inputs=False)

    def shard(module: nn.Module | list[nn.Module], over: DeviceMesh, reshard: bool) -> None:
        def by_shape(parameter: nn.Parameter) -> Shard:
            return Shard(sharded_dimension(local_part(parameter).shape, over.size(-1)))

        with shards_on_demand():
            fully_shard(module, mesh=over, mp_policy=policy, reshard_after_forward=reshard, shard_placement_fn=by_shape)

    units = [[*dict.fromkeys(model.get_submodule(name) for name in unit)] for unit in structure.units]
    if shards == 1:
        size = sum(part.numel() * part.element_size() for part in map(local_part, model.parameters()))
        for unit in () if replicates_at_once(mesh.device_type, size) else units:
            replicate(unit, mesh=mesh["dp_replicate"], mp_policy=policy)
        replicate(model, mesh=mesh["dp_replicate"], mp_policy=policy)
        applied = "replicate"
    else:
        replicated = ("dp_replicate",) if replicas > 1 or keeps_sums else ()
        data_mesh = mesh[(*replicated, "dp_shard")]
        for index, unit in enumerate(units):
            is_last = index == len(units) - 1
            # Backward needs the last unit first: freeing it would only add an all-gather.
            reshard = reshard_after_forward == "always" or (reshard_after_forward == "default" and not is_last)
            if expert_mesh is not None:
                for experts in (module for part in unit for module in part.modules() if isinstance(module, Experts)):
                    shard(experts, expert_mesh[(*replicated, "expert_shard")], reshard)
            shard(unit, data_mesh, reshard)
        shard(model, data_mesh, reshard_after_forward == "always")
        if expert_mesh is not None:
            prefetch_experts(units)
        applied = "hybrid fully_shard" if replicas > 1 else "fully_shard"
    for module in wrapped_modules(model):
        # Plain sums on every backend. The factor alone fails on gloo, and the setters apply to one module only.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        # Reduce parameters without a gradient on this rank as zeros, from torch 2.13 on.
        if hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True)
    return [applied]


def prefetch_experts(units: Sequence[Sequence[nn.Module]]) -> None:
    """Let each FSDP unit gather the next one with its experts, or in backward the previous one, before it computes.

    By default, a unit is gathered when its forward pass begins, and the experts of a block when its backward pass
    begins. With experts that exchange rows, the host comes there only after it has waited for the device.
    """
    wrapped = [[*dict.fromkeys(part for module in unit for part in wrapped_modules(module))] for unit in units]
    for own, following in pairwise(wrapped):
        own[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(own)


def is_wrapped(ranks: int, pp: int, dtypes: ModelDtypes) -> bool:
    """Whether `fully_shard` or `replicate` wraps the model: see apply_data_parallel. ranks: of the data and tp axes."""
    parameters, compute, reduction = dtypes
    return ranks > 1 or reduction != parameters or (pp > 1 and compute != parameters)


def sharded_dimension(shape: Sequence[int], ranks: int) -> int:
    """The dimension along which `ranks` ranks shard a parameter of this shape.

    Stacked experts are sharded along dim 1 if their number is not divisible by the ranks: some ranks would hold none.
    """
    n_experts, *others = shape
    return 1 if len(others) == 2 and n_experts % ranks and others[0] % ranks == 0 else 0


def replicates_at_once(device_type: str, parameter_bytes: int) -> bool:
    """Whether `replicate` reduces all gradients in one all-reduce instead of one per unit.

    A CPU waits in each all-reduce for the slowest rank, which costs 9 % of a step of a small model (docs/LOG.md); the
    buffers of one reduction take two to three times the size of its gradients.
    """
    return device_type == "cpu" and parameter_bytes <= AT_ONCE_BYTES


class CastModule:
    """Base class of modules that compute with their parameters cast to `compute_dtype`."""

    compute_dtype: torch.dtype


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Let all modules compute with their parameters cast to `dtype`, in place; gradients keep the parameters' dtype.

    Attributes of parameters then read as the cast. Names do not change, nor do the parameters that `named_parameters`
    returns. Recomputation casts again, and compilation includes the casts in its graph.
    """
    for module in model.modules():
        names = tuple(name for name, _ in module.named_parameters(recurse=False))
        if names:
            module.__class__ = _casting(type(module), names, dtype)  # type: ignore[arg-type]


@cache  # the same class for all blocks, which then share a compiled graph
def _casting(kind: type[nn.Module], names: tuple[str, ...], dtype: torch.dtype) -> type[nn.Module]:
    def cast(name: str) -> property:
        return property(lambda module: module._parameters[name].to(dtype))

    return type(kind.__name__, (CastModule, kind), {"compute_dtype": dtype, **{name: cast(name) for name in names}})


def resolve_gradient_sync(
    policy: GradientSync, sizes: Mapping[str, int], *, bit_equal: bool = False
) -> GradientSync | None:
    """The policy for a mesh of these sizes: hybrid becomes last if dp_shard x cp is 1, and every if dp_replicate is 1.

    None with a pipeline: its stages reduce their gradients once per schedule step. bit_equal: every becomes hybrid,
    since a reduction over dp_replicate ends with a cast to the parameters' dtype, of which a step may have one only.
    """
    if sizes["pp"] > 1:
        return None
    if bit_equal and policy != "last":
        return "hybrid" if sizes["dp_shard"] * sizes["cp"] > 1 else "last"
    if policy != "hybrid":
        return policy
    if sizes["dp_shard"] * sizes["cp"] == 1:
        return "last"
    return "every" if sizes["dp_replicate"] == 1 else "hybrid"


def set_gradient_sync(model_parts: Iterable[nn.Module], policy: GradientSync | None, *, is_last: bool) -> None:
    """Set whether the next backward pass reduces gradients over dp_shard and dp_replicate.

    every: both axes, always. last: both axes if `is_last` (the last microbatch of the step); before that, the rank
    keeps unreduced gradients and gathered parameters. hybrid: dp_shard always, dp_replicate if `is_last`.
    All three give the same gradients. None: sets nothing; the pipeline decides.
    """
    for root in (part for part in model_parts if policy is not None and isinstance(part, FSDPModule)):
        root.set_requires_gradient_sync(is_last or policy != "last")
        root.set_requires_all_reduce(is_last or policy == "every")
        root.set_reshard_after_backward(is_last or policy != "last")
        root.set_is_last_backward(is_last)


def wrapped_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Modules wrapped by `fully_shard` or `replicate`, the root first."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def running_dtypes(model: nn.Module) -> ModelDtypes:
    """The dtypes of a model after `apply_data_parallel`."""
    parameters = next(model.parameters()).dtype
    root = next(wrapped_modules(model), None)
    if root is None:
        casts = (module.compute_dtype for module in model.modules() if isinstance(module, CastModule))
        return ModelDtypes(parameters, next(casts, parameters), parameters)
    policy = mixed_precision_policy(root)
    compute = policy.param_dtype or parameters
    return ModelDtypes(parameters, compute, policy.reduce_dtype or compute)
