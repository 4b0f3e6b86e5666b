"""The plan against the real program of any rank of thousands, on fake tensors. Takes 12 minutes; no GPU.

Each case builds one rank by titanlite's own code, on tensors without data and with torch's process group that sends
nothing, and runs two optimizer steps with few microbatches. The second one is compared with `titanlite plan`: calls and
bytes of each collective, except for all-reduces of scalars, and the peak of the living storages. The second table lists
what is not the program of a GPU.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.measuring import CPU, Row, configuration, report
from titanlite import trainer
from titanlite.assembly import model as assembly
from titanlite.assembly.job import job_of
from titanlite.batch import Batch, count_sequences
from titanlite.config.schema import JobConfig
from titanlite.models import attention, experts
from titanlite.models.decoder import Decoder
from titanlite.optim import owners
from titanlite.parallel import data, expert, own_code
from titanlite.parallel.mesh import EXPERT_AXES, PARAMETER_AXES, Mesh
from titanlite.planning.communication import LOADS
from titanlite.planning.estimate import RankPlan, estimate
from titanlite.ranks.distributed import World
from titanlite.runtime.memory import GIB
from titanlite.runtime.torch_internals import clear_sharding_cache

Case = tuple[str, int, tuple[int, ...], tuple[str, ...]]
CASES: dict[str, Case] = {
    "8B": ("llama3_8b", 8, (0,), ("training.global_batch_size=16",)),
    "8B, tp 8 x pp 2": (
        *("llama3_8b", 64, (0, 32)),
        ("parallelism.tp=8", "parallelism.pp=2", "training.global_batch_size=16"),
    ),
    "8B, cp 2": ("llama3_8b", 16, (0,), ("parallelism.cp=2", "training.global_batch_size=16")),
    "8B, Muon, hybrid": (
        *("llama3_8b", 16, (0,)),
        ("optimizer.name=Muon", "parallelism.dp_replicate=2", "training.global_batch_size=32"),
    ),
    "70B": ("llama3_70b", 256, (0,), ("training.global_batch_size=64",)),
    "405B": ("llama3_405b", 4096, (0, 2048, 3840), ("training.global_batch_size=512",)),
    "30B-A3B, ep 8": ("qwen3_30b_a3b", 16, (0,), ("training.global_batch_size=64",)),
    "30B-A3B, ep 8 x cp 2": (
        *("qwen3_30b_a3b", 16, (0,)),
        (
            *("parallelism.cp=2", "activation_checkpoint.mode=selective", "training.local_batch_size=1"),
            "training.global_batch_size=16",
        ),
    ),
    "gemma3 12B, pp 2 x tp 2": (
        *("llama3_8b", 16, (0,)),
        (
            *("model.family=gemma3", "model.flavor=12B", "parallelism.pp=2", "parallelism.tp=2"),
            *("parallelism.pp_schedule=Interleaved1F1B", "training.seq_len=4096", "training.global_batch_size=16"),
        ),
    ),
    "gpt-oss 20B, ep 4 x tp 2": (
        *("qwen3_30b_a3b", 16, (0,)),
        (
            *("model.family=gpt_oss", "model.flavor=20B", "parallelism.ep=4", "parallelism.tp=2"),
            "training.global_batch_size=32",
        ),
    ),
    "DeepSeek-V3 16B-A3B, ep 8 x tp 2": (
        *("qwen3_30b_a3b", 16, (0,)),
        (
            *("model.family=deepseek_v3", "model.flavor=16B-A3B", "parallelism.ep=8", "parallelism.tp=2"),
            "training.global_batch_size=32",
        ),
    ),
}
"""Configuration, number of ranks, the rehearsed ones (of pipelines: first, middle and last; of gemma3's, whose last
chunk of the loss has as few positions as what counts as scalars, the first), and settings that replace
those of the file. The batches are cut: two microbatches per step, four with pp 2, and 16 with pp 16."""

GAPS = {
    "compile": "off: blocks run operation by operation, as planned; compiled blocks keep less",
    "norms": "titanlite's function for CPUs, which keeps the same tensors as the GPU's kernel",
    "attention": "the kernel for CPUs, in the compute dtype, which keeps the same tensors; not with sinks in a window",
    "experts": "the host reads equal numbers of rows for all ranks",
    "streams": "none: memory that a stream returns later is not measured, nor is the allocator",
    "initial weights": "not drawn",
}
"""What differs from the program of a GPU -> how."""

OPERATIONS = {
    "_allgather_base_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "all_gather_into_tensor": ("all-gather", -1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "reduce_scatter_tensor": ("reduce-scatter", 0),
    "allreduce_": ("all-reduce", 0),
    "all_reduce": ("all-reduce", 0),
    "alltoall_base_": ("all-to-all", 1),
    "all_to_all_single": ("all-to-all", 0),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
}
"""torch's operations: their name in the plan, and which argument is the full tensor of Traffic; -1: the result."""


class Recorder(TorchDispatchMode):
    """Counts the collectives by (group, operation), the bytes of living storages, and host reads by place.

    scalars: all-reduces of at most as many elements are those that the plan leaves out. rows_of_experts: what the host
    "reads" of the counts of experts, see `equal_loads`.
    """

    def __init__(self, scalars: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scalars = scalars
        self.sizes: dict[int, int] = {}
        self.live = self.peak = 0
        self.collectives: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.host_reads: Counter[str] = Counter()
        self.rows_of_experts: list[list[int]] = []

    def start(self) -> None:
        for counter in (self.collectives, self.bytes, self.host_reads):
            counter.clear()
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            self.read()
            return 1
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and func._opname not in ("wait_tensor", "recv_"):
            self.count(func._opname, args, out)
        for tensor in tree_leaves((args, kwargs, out)):
            if isinstance(tensor, FakeTensor):
                self.note(tensor)
        return out

    def read(self) -> None:
        """Count a host read by the place of the code that reads."""
        frame = sys._getframe(2)
        while "_dispatch" in frame.f_code.co_filename and frame.f_back:
            frame = frame.f_back
        self.host_reads["/".join(Path(frame.f_code.co_filename).parts[-2:])] += 1

    def count(self, name: str, args: Any, out: Any) -> None:
        """Count a collective. args, out: of torch's operation `name`."""
        operation, place = OPERATIONS[name]
        tensors = [each for each in tree_leaves(out if place < 0 else args[place]) if isinstance(each, Tensor)]
        boxed = [each for each in args if isinstance(each, torch.ScriptObject) and "ProcessGroup" in f"{each._type()}"]
        group = dist.ProcessGroup.unbox(boxed[0]) if boxed else dist.distributed_c10d._resolve_process_group(args[-1])
        is_scalar = operation == "all-reduce" and sum(tensor.numel() for tensor in tensors) <= self.scalars
        if group.size() > 1 and not is_scalar:
            key = group.group_name, operation
            self.collectives[key] += 1
            self.bytes[key] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def note(self, tensor: Tensor) -> None:
        """Count the tensor's storage, if it is not one on the meta device, which has only shapes."""
        if tensor.device != CPU:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self.sizes.get(key)
        if known is None:
            weakref.finalize(storage, self.free, key)
        if known != size:
            self.sizes[key] = size
            self.live += size - (known or 0)
            self.peak = max(self.peak, self.live)

    def free(self, key: int) -> None:
        self.live -= self.sizes.pop(key)


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with real tensors, such as those that torch's DeviceMesh computes with."""

    @wraps(function)
    def call(*args: Any, **keys: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **keys)

    return call


def to_empty(module: nn.Module, *, device: torch.device) -> nn.Module:
    """nn.Module.to_empty, which cannot swap fake tensors."""
    new: dict[Tensor, Tensor] = {}

    def empty(tensor: Any) -> Any:
        if tensor not in new:
            is_dtensor = isinstance(tensor, DTensor)
            value = torch.empty_like(tensor._local_tensor if is_dtensor else tensor, device=device)
            value = DTensor(value, tensor._spec, requires_grad=False) if is_dtensor else value
            new[tensor] = nn.Parameter(value) if isinstance(tensor, nn.Parameter) else value
        return new[tensor]

    for each in module.modules():
        values: Any
        for values in (each._parameters, each._buffers):
            values.update({name: empty(value) for name, value in values.items() if value is not None})
    for each in module.modules():
        if isinstance(each, FSDPModule):
            for group in each._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.reset_sharded_param()
    return module


@contextmanager
def fake_program(recorder: Recorder) -> Iterator[None]:
    """Inside, the program runs on fake tensors, which nothing computes, draws or reads."""

    def noted(function: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def resize(tensor: Tensor) -> None:
            function(tensor)
            recorder.note(tensor)

        return resize

    exchange = expert.exchanged_feed_forward

    def equal_loads(rows: Tensor, *args: Any, group: dist.ProcessGroup, **options: Any) -> Tensor:
        recorder.rows_of_experts = [[len(rows) // group.size()] * group.size()] * 2
        return exchange(rows, *args, group=group, **options)

    def read(_: Tensor) -> list[list[int]]:
        recorder.read()
        return recorder.rows_of_experts

    def scaled(model: Decoder, embeddings: Tensor) -> Tensor:  # whose scale is rounded on the host, without a read
        scale = model.config.embedding_scale
        return embeddings if scale == 1 else embeddings * scale

    grouped = {"feed_forward": experts.grouped_feed_forward}  # as on a GPU
    patches: list[tuple[Any, dict[str, Any]]] = [
        (nn.Module, {"to_empty": to_empty}),
        (_fsdp_param, {name: noted(getattr(_fsdp_param, name)) for name in ("alloc_storage", "free_storage")}),
        (assembly, {"init_parameters_": lambda *_: None}),
        (Decoder, {"scaled": scaled}),
        (attention, {"attention_dtype": lambda _, dtype: dtype}),
        (data, {"replicates_at_once": lambda *_: False}),
        (experts, grouped),
        (own_code, grouped),
        (expert, {**grouped, "exchanged_feed_forward": equal_loads}),
        (owners, {"divisions": outside(owners.divisions)}),
        (Mesh, {"shard_groups": outside(Mesh.shard_groups)}),
        (trainer, {"count_sequences": outside(count_sequences)}),
        (FakeTensor, {"tolist": read}),
    ]
    with ExitStack() as stack:
        for owner, replaced in patches:
            stack.enter_context(mock.patch.multiple(owner, **replaced))
        yield


@dataclass(frozen=True)
class Rehearsal:
    """What a rank does in a step. collectives: (calls, bytes) by (axis, operation). peak: of the living storages, in
    bytes. host_reads: by place."""

    plan: RankPlan
    collectives: dict[tuple[str, str], tuple[int, int]]
    peak: int
    host_reads: Counter[str]

    @property
    def differences(self) -> list[str]:
        """The collectives that are not as planned."""
        planned: dict[tuple[str, str], tuple[int, int]] = {
            (each.axis, each.operation): (each.calls, each.bytes) for each in self.plan.traffic
        }
        return [
            f"{' '.join(key)}: {real[0]:,} calls, {real[1]:,} bytes; planned {plan[0]:,} calls, {plan[1]:,} bytes"
            for key in sorted(planned.keys() | self.collectives.keys())
            if (real := self.collectives.get(key, (0, 0))) != (plan := planned.get(key, (0, 0)))
        ]

    @property
    def ratio(self) -> float:
        """Measured / planned peak."""
        return self.peak / self.plan.memory.total


def for_fakes(config: JobConfig, ranks: int) -> JobConfig:
    """The configuration without compilation, and with the chunks of the loss that a GPU has."""
    chunk = estimate(config, ranks, device_type="cuda").ranks[0].shape.loss_chunk
    return replace(config, compile=replace(config.compile, enable=False), loss=replace(config.loss, chunk_tokens=chunk))


def rehearse(config: JobConfig, ranks: int, rank: int) -> Rehearsal:
    """Run two steps of a rank. config: for `ranks` ranks with GPUs."""
    config = for_fakes(config, ranks)
    job, excepthook = job_of(config, ranks), sys.excepthook  # which torch replaces
    rows = job.step.rows_per_batch
    recorder = Recorder(max(rows, 2))  # losses of rows; numbers of rows and tokens
    dist.init_process_group("fake", rank=rank, world_size=ranks)
    try:
        mesh = Mesh(config.parallelism, World(rank, rank, ranks, "cpu"))
        mesh.connect(None)
        numbers = torch.arange(rows)  # the host reads them
        with fake_program(recorder):
            parts = assembly.build_parts(config, mesh)
            with FakeTensorMode(allow_non_fake_inputs=True), recorder:
                program = assembly.build_trainer(job, assembly.allocate_parts(config, parts, CPU), mesh, CPU)
                tokens = torch.zeros(rows, config.training.seq_len, dtype=torch.int64)
                batches = [Batch(tokens, tokens, numbers, numbers)] * job.step.batches
                for _ in range(2):  # the first one also has torch's caches
                    recorder.start()
                    program.train_step(batches)
        plan = estimate(config, ranks, device_type="cuda").ranks[mesh.coordinate["pp"]]
        axes: dict[str, list[str]] = {}
        for axis, group in groups_of(mesh):
            axes.setdefault(group.group_name, []).append(axis)
        collectives = {
            (_axis(axes.get(name, [name]), operation, plan), operation): (calls, recorder.bytes[name, operation])
            for (name, operation), calls in recorder.collectives.items()
        }
        return Rehearsal(plan, collectives, recorder.peak, +recorder.host_reads)
    finally:
        dist.destroy_process_group()
        clear_sharding_cache()  # which refers to the groups
        sys.excepthook = excepthook


def groups_of(mesh: Mesh) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """The groups by their name in the plan."""
    yield from ((axis, mesh.group(axis)) for axis in PARAMETER_AXES)
    if mesh.expert_mesh is not None:
        yield from ((axis, mesh.expert_mesh.get_group(axis)) for axis in EXPERT_AXES)
    if mesh.cp_group is not None:
        yield "cp", mesh.cp_group
    yield LOADS, mesh.position_group
    if (shards := mesh.shard_groups().shards) is not None:
        yield "dp_shard x tp", shards


def _axis(axes: list[str], operation: str, plan: RankPlan) -> str:
    """The axis of a group that may stand for several: the one for which the operation is planned."""
    planned = {(each.axis, each.operation) for each in plan.traffic}
    return next((axis for axis in axes if (axis, operation) in planned), axes[0])


def main(cases: tuple[str, ...] = tuple(CASES), json: Path | None = None) -> None:
    """json: folder of rehearsal.json."""
    rows: list[Row] = []
    for name in cases:
        file, ranks, chosen, settings = CASES[name]
        config = configuration([f"job.config_file={file}", *settings], ranks, "cuda", checks_files=False)
        for rank in chosen:
            begin = perf_counter()
            found = rehearse(config, ranks, rank)
            calls = sum(calls for calls, _ in found.collectives.values())
            rows.append(
                {
                    "case": name,
                    "ranks": ranks,
                    "rank": rank,
                    "collectives": calls,
                    "GiB of them": sum(size for _, size in found.collectives.values()) / GIB,
                    "differences": "; ".join(found.differences) or "none",
                    "host reads": ", ".join(f"{key} {count}" for key, count in found.host_reads.items()) or "none",
                    "peak (GiB)": found.peak / GIB,
                    "plan (GiB)": found.plan.memory.total / GIB,
                    "peak / plan": found.ratio,
                    "seconds": perf_counter() - begin,
                }
            )
            print(f"{name}, rank {rank}: peak / plan {found.ratio:.2f}", file=sys.stderr, flush=True)
    gaps: list[Row] = [{"part": part, "here": text} for part, text in GAPS.items()]
    report("rehearsal", {"One rank of many": rows, "Gaps": gaps}, json, {"peak / plan": ".2f", "seconds": ".0f"})
