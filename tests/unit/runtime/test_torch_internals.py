"""Each private name of torch that titanlite uses exists in the installed torch, and does what it is used for."""

import importlib
import json
import time
from datetime import timedelta
from itertools import product
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.config
import torch._functorch.config
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tests.unit.models.test_float8 import ON_CPU
from titanlite.models.linear import HAS_ONEDNN
from titanlite.ranks.distributed import set_timeout
from titanlite.runtime import torch_internals as internals


def test_each_function_is_tested_here() -> None:
    functions = {name for name, value in vars(internals).items() if isinstance(value, FunctionType)}
    source = Path(__file__).read_text("utf-8")
    untested = {name for name in functions if not name.startswith("_") and f"internals.{name}(" not in source}
    assert untested == {"contextmanager", "tree_leaves"}  # not ours


def test_groups_and_meshes(group: dist.ProcessGroup) -> None:
    internals.set_group_timeout(group, timedelta(seconds=77), timedelta(seconds=99))  # gloo's, also for GPUs
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    assert internals.gloo_options(timedelta(seconds=5))._timeout == timedelta(seconds=5)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    assert internals.flattened(mesh["a", "b"], "ab").mesh_dim_names == ("ab",)
    assert internals.unflattened(mesh, "b", (1, 1), ("c", "d")).mesh_dim_names == ("a", "c", "d")


def test_nccl_has_a_timeout_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts: dict[str, timedelta] = {}

    class Nccl:
        def _set_default_timeout(self, timeout: timedelta) -> None:
            timeouts["nccl"] = timeout

    class Group:
        _device_types = (torch.device("cpu"), torch.device("cuda"))

        def _get_backend(self, device: torch.device) -> Nccl:
            assert device.type == "cuda"
            return Nccl()

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(dist, "set_timeout", lambda timeout, _: timeouts.update(all=timeout), raising=False)
    set_timeout([Group()], 5)  # type: ignore[list-item]
    assert timeouts == {"all": timedelta(seconds=5), "nccl": timedelta(seconds=65)}


def test_rendezvous_of_nodes() -> None:
    store = dist.HashStore()
    backend = C10dRendezvousBackend(store, "run")
    handler = DynamicRendezvousHandler.from_backend("run", store, backend, 1, 2, local_addr="w0")
    internals.set_join_timeout(handler, 5)
    assert handler._get_deadline(handler.settings.timeout.join) <= time.monotonic() + 5
    assert internals.hosts_of_nodes(handler) == {"w0": 1}
    for host in ("w0", "w1"):
        handler._state_holder.state.participants[DynamicRendezvousHandler._node_desc_generator.generate(host)] = 0
    assert internals.hosts_of_nodes(handler) == {"w0": 2, "w1": 1}
    handler._state_holder.state.complete = True
    assert internals.hosts_of_nodes(handler, is_restart=True) == {"w0": 1}


def test_private_names_in_other_modules() -> None:
    """Those of objects and base classes, which the rule of test_architecture does not see."""
    assert all(callable(getattr(LocalElasticAgent, name)) for name in ("_rendezvous", "_monitor_workers"))
    store = dist.HashStore()
    handler = DynamicRendezvousHandler.from_backend("run", store, C10dRendezvousBackend(store, "run"), 1, 1)
    assert handler._bootstrap_store_info is None
    layer = nn.Linear(1, 1)
    layer.register_buffer("table", torch.ones(1), persistent=False)
    assert (layer._non_persistent_buffers_set, [*layer._parameters]) == ({"table"}, ["weight", "bias"])
    assert torch.ops.aten.view.default._schema.returns[0].alias_info is not None


def test_functional_collectives(group: dist.ProcessGroup) -> None:
    operations, name, x = internals.functional_collectives(), group.group_name, torch.ones(2)
    results = [
        operations.all_reduce(x, "sum", name),
        operations.all_gather_into_tensor(x, 1, name),
        operations.reduce_scatter_tensor(x, "sum", 1, name),
        operations.all_to_all_single(x, [2], [2], name),
    ]
    assert [operations.wait_tensor(result).tolist() for result in results] == [[1, 1]] * 4


@pytest.mark.usefixtures("group")
def test_recorded_collectives() -> None:
    assert "entries" in json.loads(internals.recorded_collectives()["gloo"])


def test_numbers_of_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's recorder takes the same argument as that of gloo, which a build for CPUs has."""
    torchs = torch._C._distributed_c10d
    assert hasattr(torchs, "_dump_nccl_trace_json") or internals.numbers_of_collectives() == ""
    monkeypatch.setattr(torchs, "_dump_nccl_trace_json", torchs._dump_fr_trace_json, raising=False)
    found = json.loads(internals.numbers_of_collectives())
    assert "entries" not in found
    (status, *_) = found["pg_status"].values()
    assert status.keys() == {f"last_{what}_collective" for what in ("enqueued", "started", "completed")}


@pytest.mark.usefixtures("group")
def test_fsdp_and_dtensors() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    replicated, sharded = nn.Linear(2, 2), nn.Linear(2, 2)
    internals.replicate(replicated, mesh=mesh, mp_policy=policy)
    fully_shard(sharded, mesh=mesh, mp_policy=policy)
    for module in (replicated, sharded):
        assert internals.mixed_precision_policy(module).param_dtype == torch.bfloat16
    cut = distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)])
    assert internals.shape_and_offset(cut) == ((3, 2), (0, 0))
    assert [internals.is_dtensor(each) for each in (cut, internals.local_part(cut))] == [True, False]
    axes = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    of_both = distribute_tensor(torch.zeros(3, 2), axes, [Shard(1), Shard(-2)])
    assert internals.cutting_axes(of_both) == [(1, 0), (0, 1)]
    strided = DTensor.from_local(torch.zeros(3, 2), axes, [_StridedShard(0, split_factor=2), Shard(0)])
    assert internals.cutting_axes(strided) == [(1, 0), (0, 0)]


def test_shards_are_made_when_they_are_read() -> None:
    """As many views as torch reads, and the same ones as without."""
    original = _fsdp_param._chunk_with_empty
    with internals.shards_on_demand():
        assert _fsdp_param._chunk_with_empty is not original
        for count in (1, 2, 3, 5, 7, 9):
            for dim, tensor in product((0, 1), (torch.rand(7, 9), torch.rand(1, 1), torch.rand(9, 0))):
                made, expected = _fsdp_param._chunk_with_empty(tensor, count, dim), original(tensor, count, dim)
                if tensor.size(dim):
                    assert all(map(torch.equal, made, expected))
                    assert [each.shape for each in made] == [each.shape for each in expected]
        with CountViews() as views:
            made = _fsdp_param._chunk_with_empty(torch.rand(2**14, 1), 2**14, 0)
            assert made[5].shape == made[0].shape == (1, 1)
    assert views.count == 2
    assert _fsdp_param._chunk_with_empty is original


class CountViews(internals.TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.slice.Tensor, torch.ops.aten.split.Tensor)
        return func(*args, **(kwargs or {}))


def test_replicas_of_a_shard_are_written_once() -> None:
    plan = create_default_local_save_plan({"a": torch.ones(2), "b": torch.ones(3)}, is_coordinator=False)
    first, second = internals.without_replicas([plan, plan])
    assert sorted(item.index.fqn for item in first.items + second.items) == ["a", "b"]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_shared_parameter(is_wrapped: bool) -> None:
    first, second = (nn.Sequential(nn.Linear(2, 2, bias=False)) for _ in range(2))
    for model in (first, second) if is_wrapped else ():
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    internals.share_parameter(first, "0.weight", second, "0.weight")
    weight = first.get_parameter("0.weight")
    assert second.get_parameter("0.weight") is weight
    with torch.no_grad():
        weight.fill_(3.0)
    results = [model(torch.ones(1, 2)) for model in (first, second)]
    assert [result.tolist() for result in results] == [[[6, 6]]] * 2
    torch.stack(results).sum().backward()
    assert weight.grad is not None
    assert (weight.grad == 2).all()


def test_fake_tensors() -> None:
    with internals.fake_tensors():
        fake = torch.zeros(3)
        assert internals.is_fake(fake)
        assert isinstance(fake, internals.class_of_fakes())
        assert internals.storage_key(fake) == internals.storage_key(fake[1:])
        assert internals.storage_key(fake) != internals.storage_key(torch.zeros(3))
        with internals.real_tensors():
            assert torch.ones(2).tolist() == [1, 1]
    assert not internals.is_fake(torch.zeros(3))


def test_storages_of_gathered_parameters(group: dist.ProcessGroup) -> None:
    storages = internals.module_of_fsdp_storages()
    gathered = torch.empty(4)
    storages.free_storage(gathered)
    assert gathered.untyped_storage().size() == 0
    storages.alloc_storage(gathered)
    assert gathered.untyped_storage().size() == 16
    model = fully_shard(nn.Linear(2, 3), mesh=init_device_mesh("cpu", (group.size(),)))
    assert [each.sharded_param for each in internals.fsdp_parameters(model)] == [*model.parameters()]
    other = internals.like_dtensor(model.weight, torch.ones(3, 2))
    assert isinstance(other, DTensor)
    assert isinstance(model.weight, DTensor)
    assert (other.placements, other.shape) == (model.weight.placements, model.weight.shape)
    assert internals.like_dtensor(torch.zeros(2), torch.ones(5)).tolist() == [1] * 5


def test_dtype_of_sums_over_tp(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    seen: list[torch.dtype] = []
    reduce = _fsdp_param.FSDPParam._get_grad_inner_tensor

    def noted(parameter: Any, gradient: torch.Tensor) -> torch.Tensor:
        seen.append(gradient.dtype)
        return reduce(parameter, gradient)

    monkeypatch.setattr(_fsdp_param.FSDPParam, "_get_grad_inner_tensor", noted)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tp"))
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh["tp"], [Replicate()]))
    model.forward = lambda x: x * model.weight.to_local(grad_placements=[Partial()])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh["data"], mp_policy=policy)
    model(torch.ones(4)).sum().backward()
    assert seen == [torch.float32 if internals.sums_over_tp_are_wide() else torch.bfloat16]


def test_operations_of_collectives(group: dist.ProcessGroup) -> None:
    seen: list[tuple[str, dist.ProcessGroup]] = []

    class Spy(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in ("c10d", "_c10d_functional") and internals.operation_name(func) != "wait_tensor":
                seen.append((internals.operation_name(func), internals.group_of_operation(args)))
            return func(*args, **(kwargs or {}))

    with Spy():  # type: ignore[no-untyped-call]
        dist.all_reduce(torch.ones(2), group=group)
        functional = internals.functional_collectives()
        functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", group))
    assert seen == [("allreduce_", group), ("all_reduce", group)]


def test_reads_by_the_host() -> None:
    seen: list[bool] = []

    class Spy(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(internals.is_host_read(func))
            return func(*args, **(kwargs or {}))

    number = torch.ones(())
    with Spy():  # type: ignore[no-untyped-call]
        number.item()
        number.add(1)
    assert seen == [True, False]


def test_attention_kernels() -> None:
    before = internals.attention_kernels()
    order = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(before, set_priority=True):
        internals.set_attention_kernels(order)
        assert internals.attention_kernels() == order
    inputs = (torch.zeros(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    choice = internals.fused_attention_choice(*inputs, enable_gqa=False)
    assert SDPBackend(choice) == SDPBackend.FLASH_ATTENTION
    names = {operation.name() for operation in internals.fused_attention_operations()}
    assert {f"aten::_scaled_dot_product_{name}" for name in ("flash_attention", "flash_attention_for_cpu")} < names


@pytest.mark.skipif(not ON_CPU, reason="torch has no float8 products on CPUs in this version")
def test_scaled_products() -> None:
    rows, factor = torch.eye(16).to(torch.float8_e4m3fn), torch.ones(())
    kind = functional.ScalingType.TensorWise
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        functional.scaled_mm(rows, rows.t(), factor, kind, factor, kind)
    assert internals.product_operations()[0].name() in {event.key for event in profiler.key_averages()}


@pytest.mark.skipif(not HAS_ONEDNN, reason="torch does not multiply by oneDNN here")
def test_linear_layers_by_onednn() -> None:
    """Also of operands whose rows or columns are parts of larger tensors."""
    x, weight = torch.randn(2, 9, 40)[..., 3:33], torch.randn(30, 7).T
    torch.testing.assert_close(internals.linear_of_onednn(x, weight), functional.linear(x, weight))


def test_only_needed_gradients_are_computed() -> None:
    needs: list[list[bool]] = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: object, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x * y

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
            nodes = (node for node, _ in ctx.next_functions)  # type: ignore[attr-defined]
            needs.append([internals.is_needed_by_backward(node) for node in nodes])
            assert internals.is_in_backward()
            return grad, grad

    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    x, y = x + 0, y + 0  # torch answers for nodes that are not leaves
    torch.autograd.grad(Product.apply(x, y), [y])
    assert needs == [[False, True]]
    assert not internals.is_in_backward()


def test_foreach() -> None:
    tensors = [torch.full((2,), 3.0), torch.full((3,), 2.0)]
    internals.scale_all_(tensors, torch.tensor(0.5))
    assert [tensor[0].item() for tensor in tensors] == [1.5, 1.0]
    assert [norm.item() for norm in internals.norm_of_each(tensors, torch.float64)] == [4.5**0.5, 3**0.5]


def test_attention_on_a_cpu() -> None:
    queries, keys, values = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64, requires_grad=True).unbind()
    scores = (queries @ keys.mT / 2.0).masked_fill(torch.ones(5, 5).triu(1) > 0, -torch.inf)
    out, logsumexp = internals.attention_on_cpu(queries, keys, values, None, is_causal=True)
    expected = scores.softmax(-1) @ values
    torch.testing.assert_close([out, logsumexp], [expected, scores.logsumexp(-1)])
    found = internals.attention_on_cpu_backward(
        torch.ones_like(out), queries, keys, values, out, logsumexp, None, is_causal=True
    )
    torch.testing.assert_close(list(found), list(torch.autograd.grad(expected.sum(), (queries, keys, values))))


def test_fused_adamw() -> None:
    tensors = [[torch.ones(64), torch.ones(64), torch.zeros(64), torch.zeros(64)]]
    group = {"lr": 0.5, "betas": (0.9, 0.95), "eps": 0.0, "weight_decay": 0.0}
    for skips, weight in ((1.0, 1.0), (0.0, 0.5)):
        internals.fused_adamw_(tensors, [torch.ones(())], group, torch.tensor(skips))
        assert tensors[0][0].tolist() == [weight] * 64


def test_settings_of_the_compiler() -> None:
    with torch._functorch.config.patch(activation_memory_budget=1.0):
        internals.set_activation_memory_budget(0.25)
        assert torch._functorch.config.activation_memory_budget == 0.25
    before = internals.compiler_settings()
    assert before.keys() == {"donated_buffer", "allow_unspec_int_on_nn_module", "recompile_limit"}
    changed = {name: value + 1 if name == "recompile_limit" else not value for name, value in before.items()}
    for settings in (changed, before):
        internals.set_compiler(**settings)
        assert internals.compiler_settings() == settings
        assert torch._functorch.config.donated_buffer is settings["donated_buffer"]
        assert torch._dynamo.config.allow_unspec_int_on_nn_module is settings["allow_unspec_int_on_nn_module"]


class HostCopies(internals.TorchDispatchMode):
    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if internals.is_host_copy(func, args, kwargs or {}):
            self.found += 1
            return torch.ones(args[0].shape)
        return func(*args, **(kwargs or {}))


def test_copies_to_the_host() -> None:
    """From "meta", in place of a GPU."""
    with HostCopies() as copies:
        assert torch.empty(2, device="meta").tolist() == [1, 1]
        torch.empty(2, device="meta").to(torch.float64)
        torch.ones(2).to(torch.float64)
        torch.ones(2).to("meta")
    assert copies.found == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_compiled_region_is_an_operation() -> None:
    """Of the modes of selective recomputation."""
    seen = list[Any]()

    def policy(_context: Any, operation: Any, *_args: Any, **_keys: Any) -> CheckpointPolicy:
        seen.append(operation)
        return CheckpointPolicy.MUST_SAVE

    for options in (internals.REGION_AS_OPERATION, {}):
        torch._dynamo.reset()
        seen.clear()
        function = torch.compile(torch.mm, dynamic=False, options=options)
        with create_selective_checkpoint_contexts(policy)[0]:
            function(torch.ones(3, 3), torch.ones(3, 3))
        assert (internals.compiled_region_operation() in seen) == bool(options)


@pytest.mark.usefixtures("group")
def test_caches_are_cleared() -> None:
    graphs: list[torch.fx.GraphModule] = []
    doubled = torch.compile(lambda x: x * 2, backend=lambda graph, _inputs: graphs.append(graph) or graph)
    for compiled in (1, 1, 2):
        if compiled == 2:
            internals.reset_compiler()
        doubled(torch.ones(1))
        assert len(graphs) == compiled
    internals.clear_sharding_cache()


def test_a_running_profiler_is_seen() -> None:
    assert not internals.is_profiling()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        assert internals.is_profiling()


def test_names_for_gpus_exist() -> None:
    from torch.cuda._pin_memory_utils import pin_memory

    memory = torch.cuda.memory
    assert all(callable(name) for name in (memory._record_memory_history, memory._dump_snapshot, pin_memory))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_of_a_gpu(tmp_path: Path) -> None:
    internals.record_allocations(100)
    host = torch.zeros(1000)
    internals.write_allocations(str(tmp_path / "blocks.pickle"))
    assert (tmp_path / "blocks.pickle").stat().st_size > 0
    internals.pin_in_place(host.data_ptr(), host.nbytes)
    assert host.is_pinned()


@pytest.mark.slow
def test_compiled_graphs_and_their_limit() -> None:
    function = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    before = internals.compiled_graphs()
    try:
        # compiled attention raises the limit of its process
        with torch._dynamo.config.patch(recompile_limit=8), internals.strict_compiler():
            for size in range(2, 10):
                function(torch.ones(size))
            assert [now - then for now, then in zip(internals.compiled_graphs(), before, strict=True)] == [8, 0]
            with pytest.raises(Exception, match="recompile_limit"):
                function(torch.ones(10))
        internals.reset_compiler()
        with internals.strict_compiler(recompiles=False):
            function(torch.ones(2))
            with pytest.raises(Exception, match=r"[Rr]ecompil"):
                function(torch.ones(3))
    finally:
        internals.reset_compiler()


def test_names_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(torch.cuda._sleep)
    cycles: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append)
    internals.occupy_gpu(10)
    assert cycles == [10]
    config = importlib.import_module("torch._inductor.config")
    for is_static in (False, True):
        with config.patch(use_static_cuda_launcher=is_static):  # monkeypatch would delete the key at its end
            assert internals.has_static_launcher() is is_static
