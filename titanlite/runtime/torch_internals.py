"""All private and unstable names of torch in titanlite: a torch that lacks one fails here, and in this module's test.

Each function says what it is for and, where a public name exists or comes, which. Checked with torch 2.11 and 2.13
to 2.15 by scripts/test_torch.sh. What `import torch` does not import is imported when it is used, or a start would
be slower.
"""

import importlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # sees every operation
from torch.utils._pytree import tree_leaves as tree_leaves

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.checkpoint import SavePlan
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import DTensor
    from torch.nn.attention import SDPBackend


# DTensors, without the import of torch.distributed.tensor, which takes 0.7 seconds of CPU time: commands that build no
# model, such as `titanlite inspect`, do without it.


def is_dtensor(tensor: Tensor) -> TypeGuard["DTensor"]:
    """Whether the tensor is a DTensor. Before the import of torch.distributed.tensor, no tensor is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, without its autograd graph; shares its memory."""
    return (tensor.to_local() if is_dtensor(tensor) else tensor).detach()


def like_dtensor(tensor: Tensor, local: Tensor) -> Tensor:
    """A tensor cut as `tensor` is, with another local part, which may be uneven."""
    if not is_dtensor(tensor):
        return local
    kind: Any = sys.modules["torch.distributed.tensor"]
    made: Tensor = kind.DTensor(local, tensor._spec, requires_grad=False)
    return made


# Process groups and meshes


def set_group_timeout(group: "dist.ProcessGroup", timeout: timedelta, of_nccl: timedelta) -> None:
    """Set the timeout of later collectives. Public as dist.set_timeout since 2.14, where the old name warns.

    of_nccl: of the group's collectives on GPUs, which no public function sets apart.
    """
    import torch.distributed as dist

    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    change(timeout, group)
    if dist.is_nccl_available() and torch.device("cuda") in group._device_types:
        backend = group._get_backend(torch.device("cuda"))
        if isinstance(backend, dist.ProcessGroupNCCL):  # else gloo, which has both kinds of devices
            backend._set_default_timeout(of_nccl)


def gloo_options(timeout: timedelta) -> Any:
    """Options of a gloo group; gloo's sends and receives keep the timeout that their group was created with."""
    import torch.distributed as dist

    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    return options


def flattened(mesh: "DeviceMesh", name: str) -> "DeviceMesh":
    """The mesh with all of its axes joined to one, of this name. A collective if its group is new."""
    return mesh._flatten(name)


def unflattened(mesh: "DeviceMesh", axis: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> "DeviceMesh":
    """The mesh with one axis split into several. A collective. torch 2.11 refuses the name of an axis that exists."""
    assert mesh.mesh_dim_names is not None
    return mesh._unflatten(mesh.mesh_dim_names.index(axis), sizes, names)


def functional_collectives() -> Any:
    """The collectives that torch.compile and selective recomputation know as operations. The public
    torch.distributed._functional_collectives wraps them in a tensor subclass."""
    return torch.ops._c10d_functional


def recorded_collectives() -> dict[str, str]:
    """The last collectives of this process by backend, as JSON text: torch's flight recorder. Builds of torch without
    a backend have no records of it. NCCL's asks the device, with Python's lock held, which of them have ended."""
    return {backend: dump().decode() for backend, dump in _recorders().items()}


def numbers_of_collectives() -> str:
    """The numbers of NCCL's last collectives by group, as JSON text, without asking the device; "" if torch has no
    records of NCCL."""
    dump = _recorders().get("nccl")
    return "" if dump is None else dump(includeCollectives=False).decode()


def _recorders() -> dict[str, Any]:
    from torch._C import _distributed_c10d

    names = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
    dumps = {backend: getattr(_distributed_c10d, name, None) for backend, name in names.items()}
    return {backend: dump for backend, dump in dumps.items() if dump is not None}


def hosts_of_nodes(handler: Any, *, is_restart: bool = False) -> Counter[str]:
    """Host names of the nodes in the present round of a dynamic rendezvous, and of this one. is_restart: without those
    that have not left the last round."""
    state = handler._state_holder.state
    nodes = state.wait_list if is_restart and state.complete else state.participants
    return Counter(node.addr for node in {*nodes, handler._this_node})


def set_join_timeout(handler: Any, seconds: float) -> None:
    """Set how long the next rounds of a dynamic rendezvous wait for nodes. Public only for the first round."""
    handler.settings.timeout._join = timedelta(seconds=seconds)


# FSDP, DTensors


class _Shards(Sequence[Tensor]):
    """What torch.chunk returns, and empty tensors up to `count`; each is made when it is read."""

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim
        self._length = -(-tensor.size(dim) // count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(index)
        begin = index * self._length
        length = min(self._length, self._tensor.size(self._dim) - begin)
        return self._tensor.narrow(self._dim, begin, length) if length > 0 else self._tensor.new_empty(0)


@contextmanager
def shards_on_demand() -> Iterator[None]:
    """fully_shard makes only the shards that it reads: it cuts each parameter into one for each rank, and reads two. A
    torch without the private name only takes longer: 100 seconds for a large model on 16,384 ranks."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    original = getattr(_fsdp_param, "_chunk_with_empty", None)
    if original is None:
        yield
        return
    _fsdp_param._chunk_with_empty = _Shards  # type: ignore[assignment]
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = original


def replicate(module: nn.Module | list[nn.Module], **keys: Any) -> None:
    """Replicated data parallelism by FSDP's mechanism. The public torch.distributed._composable.replicate is DDP's."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(module, **keys)


def mixed_precision_policy(module: Any) -> "MixedPrecisionPolicy":
    """The policy of a module that `fully_shard` or `replicate` has wrapped."""
    policy: MixedPrecisionPolicy = module._get_fsdp_state()._mp_policy
    return policy


def share_parameter(model: nn.Module, name: str, other: nn.Module, other_name: str) -> None:
    """Replace a parameter of the model `other` by that of `model`, which has the same shape and wrapping."""
    module_name, _, leaf = other_name.rpartition(".")
    module, parameter = other.get_submodule(module_name), model.get_parameter(name)
    managed, own = _fsdp_parameter(model, parameter), _fsdp_parameter(other, module._parameters[leaf])
    module._parameters[leaf] = parameter
    if own is not None:  # both are gathered from the same memory, and their gradients are added up
        own.sharded_param, own._sharded_param_data = parameter, managed._sharded_param_data


def _fsdp_parameter(model: nn.Module, parameter: nn.Parameter | None) -> Any:
    """What FSDP knows of a sharded parameter; None if it is not wrapped."""
    return next((each for each in fsdp_parameters(model) if each.sharded_param is parameter), None)


def shape_and_offset(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of a DTensor's local part, and its offset in the global tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def cutting_axes(tensor: "DTensor") -> list[tuple[int, int]]:
    """The mesh axes that cut a DTensor, with the dimension that each cuts, so that each cuts what those before leave.
    Cuts of earlier dimensions come first. A shard with a split_factor is cut after those of later axes."""
    cuts = [
        (placement.dim, getattr(placement, "split_factor", 0) > 0, axis)
        for axis, placement in enumerate(tensor.placements)
        if hasattr(placement, "dim")
    ]
    return [(axis, dim % tensor.dim()) for dim, _, axis in sorted(cuts)]


# Checkpoints


def without_replicas(plans: "list[SavePlan]") -> "list[SavePlan]":
    """DCP's plans of all ranks, with each item in only one of them. The public DefaultSavePlanner compares all pairs of
    a tensor's shards, too."""
    from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans

    return dedup_save_plans(plans)


# Kernels and autograd


def set_attention_kernels(kernels: "Sequence[SDPBackend]") -> None:
    """Set the order of scaled_dot_product_attention's kernels for the process. The public sdpa_kernel is a context."""
    torch.nn.attention._sdpa_kernel(kernels, set_priority=True)


def attention_kernels() -> "list[SDPBackend]":
    """The order of scaled_dot_product_attention's kernels."""
    kernels: list[SDPBackend] = torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)
    return kernels


def fused_attention_choice(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> int:
    """The number of the kernel that causal scaled_dot_product_attention takes for these tensors."""
    choice: int = torch.ops.aten._fused_sdp_choice(query, key, value, is_causal=True, enable_gqa=enable_gqa)
    return choice


def fused_attention_operations() -> tuple[Any, ...]:
    """The operations that scaled_dot_product_attention calls, as selective recomputation sees them."""
    kernels = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    return tuple(getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default for kernel in kernels)


def product_operations() -> tuple[Any, ...]:
    """The operations that functional.scaled_mm and grouped_mm call, as selective recomputation sees them."""
    return torch.ops.aten._scaled_mm_v2.default, torch.ops.aten._grouped_mm.default


_COPY = torch.ops.aten._to_copy.default


def is_host_copy(operation: Any, args: Sequence[Any], keys: Mapping[str, Any]) -> bool:
    """Whether this call of an operation copies a tensor of a device to the host, as `tolist` does, too."""
    if operation is not _COPY or keys.get("device") is None:
        return False
    source: Tensor = args[0]
    return torch.device(keys["device"]).type == "cpu" != source.device.type


def linear_of_onednn(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T by oneDNN, in float32 on CPUs: functional.linear is by MKL. Not differentiable."""
    rows: Tensor = torch.ops.mkldnn._linear_pointwise(x.flatten(0, -2), weight, None, "none", [], "")
    return rows.resize_(*x.shape[:-1], len(weight))  # no view: autograd lets nobody change views of its functions


def attention_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """The result of scaled_dot_product_attention's kernel on CPUs, and the logsumexp of scores, (batch, heads,
    queries), that the public function does not return. Not differentiable."""
    result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask
    )
    return result


def attention_on_cpu_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, out, logsumexp, 0.0, is_causal, attn_mask=mask
    )
    return result


def is_needed_by_backward(node: Any) -> bool:
    """Whether the running backward pass computes the gradient of this node of the graph; None: of a constant."""
    return node is not None and torch._C._will_engine_execute_node(node)


def is_in_backward() -> bool:
    """Whether this thread computes a backward pass: which may run a forward pass again."""
    return torch._C._current_graph_task_id() != -1


def scale_all_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each tensor in place, in one kernel on GPUs."""
    torch._foreach_mul_(tensors, factor)


def fused_adamw_(
    tensors: Sequence[Sequence[Tensor]], steps: Sequence[Tensor], group: Mapping[str, Any], found_inf: Tensor
) -> None:
    """The update of torch.optim.AdamW(fused=True). tensors: weights, gradient and the two moments of each parameter."""
    weights, gradients, first, second = (list(each) for each in zip(*tensors, strict=True))
    names = ("lr", "weight_decay", "eps")
    values = {name: group[name] for name in names} | dict(zip(("beta1", "beta2"), group["betas"], strict=True))
    torch._fused_adamw_(
        *(weights, gradients, first, second, [], [*steps]), **values, amsgrad=False, maximize=False, found_inf=found_inf
    )


def norm_of_each(tensors: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The 2-norm of each tensor, in one kernel on GPUs."""
    return torch._foreach_norm(tensors, 2, dtype=dtype)


# Compiler


def set_activation_memory_budget(budget: float) -> None:
    """The share of a compiled block's activations that it may keep, 0 to 1, for blocks compiled from now on."""
    import torch._functorch.config as functorch

    functorch.activation_memory_budget = budget


COMPILER_SETTINGS = {
    "donated_buffer": ("torch._functorch.config", True),
    "allow_unspec_int_on_nn_module": ("torch._dynamo.config", False),
    "recompile_limit": ("torch._dynamo.config", 8),
}
"""Settings that a run may change, with their module and default. donated_buffer: compiled backward passes free buffers
for reuse; one that is split in two needs them in its second half. allow_unspec_int_on_nn_module: blocks that differ in
an integer, such as the index of a layer, share their compiled code. recompile_limit: versions of one function."""


REGION_AS_OPERATION = {"wrap_inductor_compiled_regions": True}
"""Options of torch.compile that make the call of a compiled function `compiled_region_operation` for selective
recomputation, which otherwise does not see it."""


def compiled_region_operation() -> Any:
    """The operation that calls a function compiled with REGION_AS_OPERATION."""
    from torch._higher_order_ops.wrap import inductor_compiled_code

    return inductor_compiled_code


def compiler_settings() -> dict[str, int]:
    """COMPILER_SETTINGS, without importing the compiler: so that a part of a process can restore them."""
    modules = {name: (sys.modules.get(module), default) for name, (module, default) in COMPILER_SETTINGS.items()}
    return {name: getattr(module, name, default) for name, (module, default) in modules.items()}


def set_compiler(**settings: int) -> None:
    """Change some of COMPILER_SETTINGS. Imports their modules if a value is not the current one."""
    now = compiler_settings()
    for name, value in settings.items():
        if value != now[name]:
            setattr(importlib.import_module(COMPILER_SETTINGS[name][0]), name, value)


def reset_compiler() -> None:
    """Forget compiled blocks, whose number is limited. Public as torch.compiler.reset, which imports the compiler."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def compiled_graphs() -> tuple[int, int]:
    """The numbers of graphs that Dynamo has compiled in this process, and of breaks between graphs."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def strict_compiler(*, recompiles: bool = True) -> Any:
    """A context in which torch.compile raises an error in place of calling a function itself, after recompile_limit
    versions of it. recompiles: False: also for each new version of a function."""
    from torch._dynamo import config

    return config.patch(fail_on_recompile_limit_hit=True, error_on_recompile=not recompiles)


def clear_sharding_cache() -> None:
    """Drop the cache of DTensor's sharding rules, which refers to meshes: a result is on the first mesh of equal ranks
    and names, with its process groups, also if the operands are on another one. So two such meshes must not be used in
    turns."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def has_static_launcher() -> bool:
    """Whether compiled code launches Triton's kernels by a function of torch that holds Python's lock."""
    config: Any = importlib.import_module("torch._inductor.config")
    return bool(config.use_static_cuda_launcher)


# Profiler, memory


def is_profiling() -> bool:
    """Whether a profiler records: asking costs a tenth of a microsecond, record_function 10 to 20."""
    return torch.autograd._profiler_enabled()


def record_allocations(max_entries: int) -> None:
    """Record the allocations of CUDA memory, for write_allocations."""
    torch.cuda.memory._record_memory_history(max_entries=max_entries)


def write_allocations(path: str) -> None:
    """Write the blocks of the CUDA allocator, and the recorded allocations, as a pickle for torch's viewer."""
    torch.cuda.memory._dump_snapshot(path)


def pin_in_place(address: int, size: int) -> None:
    """Lock `size` bytes of existing host memory, so that copies from a GPU do not wait. Public names pin a copy."""
    from torch.cuda._pin_memory_utils import pin_memory

    pin_memory(address, size)


def occupy_gpu(cycles: int) -> None:
    """Keep the current stream of the GPU busy for so many cycles of its clock; the host does not wait. For checks."""
    torch.cuda._sleep(cycles)


# Fake tensors, which have shapes and storages without memory


def fake_tensors() -> Any:
    """A context in which operations make tensors without data, on the device that is named, here the CPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def real_tensors() -> Any:
    """A context within `fake_tensors` in which operations compute."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def is_fake(tensor: Any) -> bool:
    """Whether the tensor has no data."""
    from torch._subclasses.fake_tensor import is_fake

    return is_fake(tensor)


def class_of_fakes() -> type[Tensor]:
    """FakeTensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def storage_key(tensor: Tensor) -> int:
    """The same number for all tensors of one storage, as long as it lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def module_of_fsdp_storages() -> Any:
    """The module whose alloc_storage(tensor) and free_storage(tensor) resize gathered parameters."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    return _fsdp_param


def sums_over_tp_are_wide() -> bool:
    """Whether FSDP adds up the gradients of parameters that are replicated over a further mesh axis in the dtype of
    its reductions, as since torch 2.15, rather than in that of the computation."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    return hasattr(_fsdp_param.FSDPParam, "may_reduce_grad_outside_dp")


def fsdp_parameters(model: nn.Module) -> list[Any]:
    """What FSDP knows of each parameter of the wrapped modules: sharded_param, reset_sharded_param(), ..."""
    wrapped: list[Any] = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    groups = [group for module in wrapped for group in _groups_of_fsdp(module._get_fsdp_state())]
    return [parameter for group in groups for parameter in group.fsdp_params]


def _groups_of_fsdp(state: Any) -> list[Any]:
    """Before torch 2.13, a module has one group at most."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def is_host_read(operation: Any) -> bool:
    """Whether an operation that a dispatch mode sees is that of Tensor.item()."""
    return operation is torch.ops.aten._local_scalar_dense.default


def operation_name(operation: Any) -> str:
    """Of an operation that a dispatch mode sees, without its namespace and overload."""
    name: str = operation._opname
    return name


def group_of_operation(args: Sequence[Any]) -> "dist.ProcessGroup":
    """The group of a collective that a dispatch mode sees. args: of the operation."""
    import torch.distributed as dist

    for each in args:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in f"{each._type()}":
            return dist.ProcessGroup.unbox(each)
    last: Any = args[-1]
    by_name: Any = dist.distributed_c10d._resolve_process_group
    group: dist.ProcessGroup = by_name(last) if isinstance(last, str) else last
    return group
