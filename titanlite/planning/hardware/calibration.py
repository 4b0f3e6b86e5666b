"""Measure the machine of the running ranks for a hardware profile: a collective, in about a minute.

All ranks measure at the same time, so that they share what they share in training.
"""

import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from time import perf_counter
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from titanlite.models.attention import attend, attention_dtype
from titanlite.models.linear import linear
from titanlite.models.llama3 import LLAMA3
from titanlite.planning.hardware.machine import Collective, Grid, Link, Profile
from titanlite.precision import DTYPES
from titanlite.ranks.agreement import share_from_rank_0
from titanlite.ranks.distributed import CommConfig, World
from titanlite.ranks.network import init_process_group
from titanlite.runtime.logging import log
from titanlite.runtime.memory import GIB, device_memory_bytes
from titanlite.runtime.peak_flops import device_peak_flops
from titanlite.runtime.torch_internals import TorchDispatchMode

Operation = Callable[[], object]

REPEATS = 3
NEGLIGIBLE_S = 1e-9
LEAST_S = 0.02
"""A round repeats its operation until it takes so long."""
SIZES = {"cpu": (64, 256, 1024, 2048), "cuda": (256, 1024, 4096, 16_384)}
"""Sizes of matrix products."""
SEQ_LENS = {"cpu": (128, 512, 2048), "cuda": (512, 2048, 8192, 32_768)}
HEAD_DIMS = (32, 64, 128)
ELEMENTWISE_BYTES = {"cpu": (2**16, 2**20, 2**24, 2**28), "cuda": (2**20, 2**24, 2**28, 2**32)}
MESSAGE_BYTES = {"cpu": (2**10, 2**14, 2**18, 2**22, 2**25), "cuda": (2**12, 2**18, 2**24, 2**28)}


class Clock:
    """Times operations on a device, on all ranks of a group at the same time. group: None: this process only."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.device = device
        self.group = group

    def seconds(self, operation: Operation) -> float:
        """Seconds of one call on the slowest rank: the fastest of REPEATS rounds of as many calls as take LEAST_S.

        The number of calls is the same on all ranks, so `operation` may be a collective of the group.
        """
        operation()
        calls = 1
        while (elapsed := self._round(operation, calls)) < LEAST_S:
            calls = max(calls + 1, min(10 * calls, round(1.2 * calls * LEAST_S / max(elapsed, 1e-9))))
        return min([elapsed, *(self._round(operation, calls) for _ in range(REPEATS - 1))]) / calls

    def _round(self, operation: Operation, calls: int) -> float:
        self._slowest(0.0)  # all start together
        begin = perf_counter()
        for _ in range(calls):
            operation()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._slowest(perf_counter() - begin)

    def _slowest(self, seconds: float) -> float:
        """The maximum over the group."""
        found = torch.tensor(seconds, dtype=torch.float64)
        if self.group is not None:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found.item()


def calibrate(world: World, store: dist.Store, dtypes: Sequence[str]) -> Profile | None:
    """Measure on all ranks; returns the profile on rank 0.

    dtypes: of computation. store: connected; the process group is created and destroyed here. On a CPU, only as many
    ranks compute at the same time as it has cores, and each with one thread. All nodes are taken to be as the first.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    store = dist.PrefixStore("calibrate", store)
    own = world.local_size, world.local_size if world.device_type == "cuda" else min(cores(), world.local_size)
    per_node, computing = share_from_rank_0("node", lambda: own, world, store, CommConfig.init_timeout_s)
    node: dict[str, Link] = {}
    cluster: dict[str, Link] = {}
    clock = Clock(world.device, None)
    if world.size > 1:
        init_process_group(world, store, CommConfig())
        node, cluster, clock = _network(world, per_node, computing)
    found = _compute(world, clock, dtypes, computing, node, cluster) if world.rank % per_node < computing else None
    if world.size > 1:
        dist.barrier()
        dist.destroy_process_group()
    torch.set_num_threads(threads)
    return found if world.rank == 0 else None


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def device_name(world: World) -> str:
    """The accelerator, or the cores of the CPU."""
    return torch.cuda.get_device_name(world.device) if world.device_type == "cuda" else f"{cores()} CPU cores"


def _compute(
    world: World, clock: Clock, dtypes: Sequence[str], computing: int, node: dict[str, Link], cluster: dict[str, Link]
) -> Profile:
    wide = [str(torch.promote_types(DTYPES[name], torch.float32)).removeprefix("torch.") for name in dtypes]
    rates = {name: DTYPES[name] for name in sorted({*dtypes, *wide})}  # routers compute in the wide one
    log.info("Measuring matrix products")
    matmul = {name: matmul_rates(clock, dtype) for name, dtype in rates.items()}
    log.info("Measuring attention")
    of_attention = {attention_dtype(world.device_type, dtype) for dtype in rates.values()}
    attention = {str(dtype).removeprefix("torch."): attention_rates(clock, dtype) for dtype in of_attention}
    log.info("Measuring memory and overhead")
    memory, operation_s = memory_rates(clock), operation_seconds(clock)
    sharing = 1 if world.device_type == "cuda" else world.local_size
    return Profile(
        name=f"{platform.node()}: {device_name(world)}",
        device="cuda" if world.device_type == "cuda" else "cpu",
        ranks_per_node=world.local_size,
        computing=computing,
        memory_gib=device_memory_bytes(world.device) / GIB / sharing,
        peak_flops={
            name: device_peak_flops(world.device, dtype) or max(matmul[name].values) for name, dtype in rates.items()
        },
        matmul=matmul,
        attention=attention,
        memory=memory,
        operation_s=operation_s,
        unit_s=unit_seconds(clock, node) if clock.group is not None and node else operation_s,
        network={scope: each for scope, each in (("node", node), ("cluster", cluster)) if each},
        sources={"all": f"titanlite calibrate, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}"},
    )


def _network(world: World, per_node: int, computing: int) -> tuple[dict[str, Link], dict[str, Link], Clock]:
    """Links of a node and, with several nodes, between them; the clock of the ranks that compute. A collective."""
    log.info("Measuring collectives")
    nodes = range(0, world.size, per_node)  # by their first rank
    inside = [_clock(world, [range(first, first + n) for first in nodes]) for n in sorted({2, per_node})]
    between = _clock(world, [nodes])
    together = _clock(world, [[first + rank for first in nodes for rank in range(computing)]])
    measured = [clock for clock in inside if clock.group is not None]
    node = links(measured) if measured else {}
    cluster = links([between]) if between.group is not None else {}
    return node, cluster, together


def _clock(world: World, groups: Sequence[Sequence[int]]) -> Clock:
    """The clock of the group that has this rank; without a group if none has. A collective: creates all of them."""
    found = None
    for group_ranks in groups:
        ranks = [rank for rank in group_ranks if rank < world.size]
        group = dist.new_group(ranks) if len(ranks) > 1 else None
        found = group if world.rank in ranks else found
    return Clock(world.device, found)


def matmul_rates(clock: Clock, dtype: torch.dtype) -> Grid:
    """FLOP/s of linear layers, by m, k and n."""
    sizes = SIZES[clock.device.type]
    values = []
    for m in sizes:
        for k in sizes:
            for n in sizes:
                x, weight = _random(clock, dtype, m, k), _random(clock, dtype, n, k)
                seconds = clock.seconds(partial(linear, x, weight))
                values.append(2 * m * k * n / seconds)
    return Grid({"m": sizes, "k": sizes, "n": sizes}, tuple(values))


def attention_rates(clock: Clock, dtype: torch.dtype) -> dict[str, Grid]:
    """FLOP/s of causal attention by pass, seq_len and head_dim, of full T x T products."""
    wide = attention_dtype(clock.device.type, dtype)
    seq_lens, heads = SEQ_LENS[clock.device.type], 4
    found: dict[str, list[float]] = {"forward": [], "backward": []}
    for seq_len in seq_lens:
        for head_dim in HEAD_DIMS:
            inputs = [_random(clock, wide, 1, heads, seq_len, head_dim).requires_grad_() for _ in range(3)]
            flops = 4 * heads * seq_len**2 * head_dim
            forward, backward = _attention(inputs)
            found["forward"].append(flops / clock.seconds(forward))
            found["backward"].append(2 * flops / clock.seconds(backward))
    return {name: Grid({"seq_len": seq_lens, "head_dim": HEAD_DIMS}, tuple(values)) for name, values in found.items()}


def _attention(inputs: Sequence[Tensor]) -> tuple[Operation, Operation]:
    """The forward and the backward pass of queries, keys and values."""
    out = attend(inputs[0], inputs[1], inputs[2], None)
    gradient = torch.randn_like(out)

    def forward() -> None:
        with torch.no_grad():
            attend(inputs[0], inputs[1], inputs[2], None)

    return forward, lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def memory_rates(clock: Clock) -> Grid:
    """Bytes per second of a product of two tensors into a new one, by its bytes."""
    sizes = ELEMENTWISE_BYTES[clock.device.type]
    values = []
    for size in sizes:
        x, y = (_random(clock, torch.float32, size // 12) for _ in range(2))
        values.append(size / clock.seconds(partial(torch.mul, x, y)))
    return Grid({"bytes": sizes}, tuple(values))


def operation_seconds(clock: Clock) -> float:
    """Seconds of the host per operation of a transformer block, with its share of modules, views and autograd: those of
    a block of a few elements, forward and backward."""
    config = replace(LLAMA3.flavors["debug"], dim=16, n_heads=2, n_kv_heads=2, ffn_dim=16, n_layers=1, vocab_size=16)
    model = LLAMA3.build(config).to(clock.device)
    model.init_buffers(clock.device)
    (block,), rope = model.get_submodule("layers").children(), model.get_submodule("rope")(None)
    x = _random(clock, torch.float32, 1, 8, config.dim).requires_grad_()

    def both() -> None:
        torch.autograd.grad(block(x, rope, None).sum(), [x, *block.parameters()])

    issued = _Operations()
    with issued:
        both()
    return clock.seconds(both) / issued.count


class _Operations(TorchDispatchMode):
    """Counts the operations that are not views, which have no kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        self.count += not is_view
        return func(*args, **(kwargs or {}))


def unit_seconds(clock: Clock, of_group: Mapping[str, Link]) -> float:
    """Seconds of the host per pass of an FSDP unit, without its operations and collectives: half of what a small unit
    adds, forward and backward. of_group: the links of the clock's group, which has more than one rank."""
    assert clock.group is not None
    units = [nn.Linear(8, 8, bias=False, device=clock.device) for _ in range(8)]
    x = _random(clock, torch.float32, 8, 8)

    def both(model: nn.Module) -> None:
        model(x).sum().backward()

    bare = clock.seconds(partial(both, nn.Sequential(*deepcopy(units))))
    mesh = DeviceMesh.from_group(clock.group, clock.device.type)
    model = nn.Sequential(*units)
    for unit in units:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    messages = 2 * of_group["all-gather"].latency_s + of_group["reduce-scatter"].latency_s
    each = (clock.seconds(partial(both, model)) - bare) / len(units) - (clock.group.size() - 1) * messages
    return max(each / 2, NEGLIGIBLE_S)


def links(clocks: Sequence[Clock]) -> dict[str, Link]:
    """Latency and bandwidth of each collective, by the formula of Profile.collective_s."""
    found: dict[str, Link] = {}
    for operation in get_args(Collective):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames the functions; 2.11 lacks the new ones
            rows = [row for clock in clocks for row in _measured(operation, clock)]
        found[operation] = line(rows)
    return found


def line(rows: Sequence[tuple[float, float, float]]) -> Link:
    """The line through (messages, bytes, seconds) of all groups and sizes whose relative errors have the least squares.

    The largest messages are limited by the bandwidth. So a line that says less of it than half of the time of the
    message with the most bytes per second comes from a disturbed time of a small one, and this half is taken.
    """
    table = torch.tensor(rows, dtype=torch.float64)
    scaled, ones = table[:, :2] / table[:, 2:], torch.ones(len(rows), 1, dtype=torch.float64)
    latency_s, byte_s = torch.linalg.lstsq(scaled, ones).solution[:, 0].tolist()
    at_least_s = min(seconds / size for _, size, seconds in rows) / 2
    return Link(max(latency_s, NEGLIGIBLE_S), 1 / max(byte_s, at_least_s))


def _measured(operation: Collective, clock: Clock) -> Iterator[tuple[float, float, float]]:
    """(messages one after the other, bytes of all of them, seconds) of messages of each size."""
    assert clock.group is not None
    size = clock.group.size()
    passes = 1 if operation == "send" else (size - 1) * (2 if operation == "all-reduce" else 1)
    for count in MESSAGE_BYTES[clock.device.type]:
        part, full = (_random(clock, torch.float32, count // 4 * parts) for parts in (1, size))
        seconds = clock.seconds(partial(_collective, operation, part, full, clock.group))
        yield float(passes), float(passes * count), seconds


def _collective(operation: Collective, part: Tensor, full: Tensor, group: dist.ProcessGroup) -> None:
    """One collective whose full tensor is `full`, `part` times the number of ranks; or one message of `part`."""
    if operation == "all-gather":
        dist.all_gather_into_tensor(full, part, group=group)
    elif operation == "reduce-scatter":
        dist.reduce_scatter_tensor(part, full, group=group)
    elif operation == "all-reduce":
        dist.all_reduce(full, group=group)
    elif operation == "all-to-all":
        dist.all_to_all_single(torch.empty_like(full), full, group=group)
    elif group.rank() < group.size() - group.size() % 2:  # pairs of neighbors
        peer = dist.get_global_rank(group, group.rank() ^ 1)
        if group.rank() % 2:
            dist.recv(part, peer, group=group)
        else:
            dist.send(part, peer, group=group)


def _random(clock: Clock, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=clock.device, dtype=torch.float32).to(dtype)
