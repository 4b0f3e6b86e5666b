"""Where the host waits for a GPU in training steps, without a GPU. Reads cases from standard input, one per line: the
number of ranks, and settings.

A program of its own, since it changes torch for the process, and needs fake_cuda.cpp in LD_PRELOAD. The real trainer
runs on tensors of the device "cuda" that have no data (torch's FakeTensorMode), as one rank of a group that sends
nothing, while tensors of the host are real. An operation that would make the host wait is noted with the function of
titanlite that calls it. It prints a line of JSON for each case: the waits of the first and of the second step by place,
and the error if there is one.

Not run: compiled code, FlexAttention and the kernels of scaled_dot_product_attention, for which products stand in.
"""

import contextlib
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titanlite.assembly import model as assembly
from titanlite.assembly.job import job_of
from titanlite.batch import Batch, StepStats
from titanlite.checkpoint.state import HostCopy
from titanlite.config.load import load_config
from titanlite.config.schema import JobConfig
from titanlite.faults.skipped import SkippedSteps
from titanlite.metrics.meter import Meter, Work
from titanlite.models import attention, experts
from titanlite.parallel import expert, own_code
from titanlite.parallel.mesh import Mesh
from titanlite.ranks.distributed import World
from titanlite.runtime.torch_internals import clear_sharding_cache, local_part
from titanlite.tools.plan.rehearsal.fakes import to_empty
from titanlite.trainer import Trainer

CUDA = torch.device("cuda", 0)
PACKAGE = "titanlite"
Place = tuple[str, str]
"""The file, below titanlite/, and the function."""

READS = {"aten._local_scalar_dense.default", "aten.equal.default", "aten.is_nonzero.default"}
"""Operations whose result is a number on the host."""
OF_ANY_SIZE = {"aten.nonzero.default", "aten.masked_select.default", "aten._unique2.default", "aten.bincount.default"}
"""Operations the size of whose result depends on numbers."""
WITH_INDEXES = {
    "aten.index.Tensor",
    "aten.index_put.default",
    "aten.index_put_.default",
    "aten._index_put_impl_.default",
}


class Spy(TorchDispatchMode):
    """Notes waits for the device. Operations on tensors of the host are done as if there were no fake tensors.

    waits: number of waits by place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[Place] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if not any(isinstance(each, FakeTensor) for each in tensors) and _device(kwargs) != "cuda":
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if _waits(str(func), tensors, args, kwargs):
            self.note()
            if str(func) in READS:
                return 1 if tensors[0].dtype != torch.bool else False
        return func(*args, **kwargs)

    def note(self) -> None:
        """Count a wait by the innermost function of titanlite."""
        self.waits[place_of_caller()] += 1


def place_of_caller() -> Place:
    frame = sys._getframe(1)
    while frame is not None:
        parts = Path(frame.f_code.co_filename).parts
        if PACKAGE in parts and "tests" not in parts and frame.f_code.co_name != "to_device":
            below = parts[len(parts) - parts[::-1].index(PACKAGE) :]
            return "/".join(below), frame.f_code.co_name
        frame = frame.f_back
    return "torch", "".join(traceback.format_stack()[-8:-2])


def _device(kwargs: dict[str, Any]) -> str:
    """The type of the device on which the result is wanted, "cpu" by default."""
    return torch.device(kwargs.get("device") or "cpu").type


def _waits(name: str, tensors: Sequence[Tensor], args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the operation makes the host wait for the device, some tensor of which takes part."""
    if name in READS | OF_ANY_SIZE:
        return True
    if name == "aten.repeat_interleave.Tensor":
        return kwargs.get("output_size") is None
    if name == "aten._to_copy.default":
        return _copy_waits(tensors[0], _device(kwargs) if "device" in kwargs else "cuda", kwargs.get("non_blocking"))
    if name == "aten.copy_.default":
        to, source = tensors
        is_blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        return to.device != source.device and _copy_waits(source, to.device.type, not is_blocking, to)
    of_host = [each for each in tensors if each.device.type == "cpu"]
    if name == "aten.where.self":  # it copies a scalar of the host to the device, as a kernel's argument it would not
        return bool(of_host)
    if name in WITH_INDEXES:
        return bool(of_host) or any(each.dtype in (torch.bool, torch.uint8) for each in tree_leaves(args[1]))
    return False


def _copy_waits(source: Tensor, to: str, non_blocking: bool | None, into: Tensor | None = None) -> bool:
    """A copy between host and device does not wait if it is asked not to, and the memory of the host is page-locked."""
    if source.device.type == to:
        return False
    of_host = source if source.device.type == "cpu" else into
    return not non_blocking or of_host is None or not is_pinned(of_host)


PINNED: set[int] = set()
"""Addresses of storages of the host that count as page-locked."""


def is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in PINNED


def pin_memory(tensor: Tensor, *_: Any) -> Tensor:
    with unset_fake_temporarily():
        pinned = tensor.clone()
    KEPT.append(pinned)
    PINNED.add(pinned.untyped_storage().data_ptr())
    return pinned


KEPT: list[Tensor] = []
"""So that no other tensor gets the address of one in PINNED."""


class FakeStream:
    """Of torch.cuda: without a driver."""

    stream_id = device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def record_event(self, _: Any = None) -> "FakeEvent":
        return FakeEvent()

    def synchronize(self) -> None:
        SPY.note()


class FakeEvent:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, _: Any = None) -> "FakeEvent":
        return self

    def wait(self, _: Any = None) -> None: ...
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        SPY.note()


SPY = Spy()
STREAM = FakeStream()


def attend_by_products(
    queries: Tensor, keys: Tensor, values: Tensor, *_: Any, enable_gqa: bool = False, **__: Any
) -> Tensor:
    """In place of scaled_dot_product_attention: it reads as much on the host as the real kernels, nothing."""
    if enable_gqa:
        keys, values = (each.repeat_interleave(queries.shape[1] // keys.shape[1], 1) for each in (keys, values))
    return (queries @ keys.transpose(-2, -1)).softmax(-1) @ values


def attend_in_blocks(
    queries: Tensor, keys: Tensor, values: Tensor, _mask: Any, sinks: Tensor | None, _cap: float
) -> Tensor:
    """In place of FlexAttention."""
    out = attend_by_products(queries, keys, values, enable_gqa=queries.shape[1] != keys.shape[1])
    return out if sinks is None else out * sinks.sigmoid().view(-1, 1, 1).to(out.dtype)


def change_torch(stack: contextlib.ExitStack) -> None:
    """Let torch run programs for CUDA without a driver, for this process."""

    def rows_of(counts: Tensor) -> list[Any]:
        """tolist of the numbers of rows of experts, which must fit."""
        counts.to("cpu")  # what it does
        return ROWS.pop() if ROWS else [1] * counts.numel()

    exchange, own = expert.exchanged_feed_forward, experts.feed_forward

    def exchanged(rows: Tensor, *arguments: Any, group: dist.ProcessGroup, **options: Any) -> Tensor:
        ROWS.append([[len(rows) // group.size()] * group.size()] * 2)
        return exchange(rows, *arguments, group=group, **options)

    def feed_forward(rows: Tensor, counts: Tensor, *weights: Tensor, **options: Any) -> Tensor:
        each = len(rows) // len(counts)
        ROWS.append([len(rows) - each * (len(counts) - 1)] + [each] * (len(counts) - 1))
        try:
            return own(rows, counts, *weights, **options)
        finally:
            ROWS.clear()

    streams = {"Stream": FakeStream, "Event": FakeEvent, "current_stream": lambda *_: STREAM}
    functions = {
        **streams,
        "stream": lambda _: contextlib.nullcontext(),
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "synchronize": lambda *_: SPY.note(),
        "is_initialized": lambda: True,
        "manual_seed": lambda _: None,
        "get_rng_state": lambda _: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "get_device_capability": lambda *_: (9, 0),
    }
    patches: list[tuple[Any, dict[str, Any]]] = [
        (torch.cuda, functions),
        (torch.accelerator, {"current_stream": lambda *_: STREAM, "synchronize": lambda *_: SPY.note()}),
        (Tensor, {"pin_memory": pin_memory, "record_stream": lambda *_: None}),
        (FakeTensor, {"tolist": rows_of}),
        (dist, {"all_gather_object": gather_object}),
        (nn.Module, {"to_empty": to_empty}),
        (nn.functional, {"scaled_dot_product_attention": attend_by_products}),
        (attention, {"_attend_in_blocks": attend_in_blocks, "block_mask": block_mask, "causal_blocks": block_mask}),
        (assembly, {"init_parameters_": lambda *_: None}),
        (experts, {"feed_forward": feed_forward}),
        (own_code, {"feed_forward": feed_forward}),
        (expert, {"exchanged_feed_forward": exchanged, "feed_forward": feed_forward}),
    ]
    for owner, replaced in patches:
        stack.enter_context(mock.patch.multiple(owner, **replaced))


ROWS: list[Any] = []
"""The answers to the next reads."""


def block_mask(rows: Tensor | int, queries: Any = None, *_: Any) -> Any:
    """In place of a mask of FlexAttention, which is built by compiled code. rows: of tokens, or their length."""
    mask = mock.Mock(spec=attention.BlockMask)
    length = rows.shape[1] if isinstance(rows, Tensor) else rows
    mask.shape = (1, 1, len(queries) if isinstance(queries, Tensor) else length, length)
    mask.mask_mod = lambda _row, _head, query, key: query >= key
    return mask


def gather_object(found: list[Any], own: Any, **_: Any) -> None:
    """In place of dist.all_gather_object, which unpickles what a group that sends nothing has received."""
    found[:] = [own] * len(found)


def config_of(ranks: int, settings: Sequence[str]) -> JobConfig:
    base = ("data.sources.0.kind=tokens", "data.sources.0.path=unused.npy", "training.seq_len=128")
    base += ("training.local_batch_size=1", "compile.enable=false", "model.n_layers=1")
    values = dict(each.split("=", 1) for each in (*base, *settings))
    return load_config(
        [f"--{key}={value}" for key, value in values.items()], world_size=ranks, device_type="cuda", checks_files=False
    )


def waits_of(ranks: int, settings: Sequence[str]) -> list[dict[str, int]]:
    """The waits of rank 0 by place, in the first and in the second step."""
    config = config_of(ranks, settings)
    job, excepthook = job_of(config, ranks), sys.excepthook
    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        mesh = Mesh(config.parallelism, World(0, 0, ranks, "cuda"))
        mesh.connect(None)
        with FakeTensorMode(allow_non_fake_inputs=True), SPY:
            parts = assembly.build_parts(config, mesh)
            trainer = assembly.build_trainer(job, assembly.allocate_parts(config, parts, CUDA), mesh, CUDA)
            around = Around(config, trainer)
            found = []
            for _ in range(2):
                SPY.waits.clear()
                around.step([batch_of(config, job.step.rows_per_batch, number) for number in range(job.step.batches)])
                found.append({" ".join(place): count for place, count in SPY.waits.items()})
            return found
    finally:
        dist.destroy_process_group()
        clear_sharding_cache()
        sys.excepthook = excepthook


class Around:
    """What the training loop calls in a step that it neither logs nor saves, while a save of the step before runs."""

    def __init__(self, config: JobConfig, trainer: Trainer) -> None:
        self.trainer = trainer
        names = [f"source {number}" for number in range(len(config.data.sources))]
        self.meter = Meter(
            dist.group.WORLD, CUDA, work=lambda _: Work(1, 1.0), peak_flops=None, sources=names, terms=config.terms
        )
        loader: Any = mock.Mock(first_sequence=0, sequences=[0], origin_values=torch.zeros(1, 3))
        self.skipped = SkippedSteps(
            config.faults,
            trainer.model_parts,
            [0] * len(trainer.model_parts),
            loader,
            dist.group.WORLD,
            mock.Mock(),
            counts_loss=True,
        )
        self.copy = HostCopy(pinned=True)
        trainer.before_update = self.copy.hold

    def step(self, batches: Sequence[Batch]) -> StepStats:
        trainer = self.trainer
        stats = trainer.train_step(batches)
        step = trainer.step
        self.skipped.note(step, stats)
        self.meter.update(step, stats, lr=trainer.schedule(step), data_wait_s=0.0, bad_rows=0, compute_s=0.0)
        named = {name: each for part in trainer.model_parts for name, each in part.named_parameters()}
        tensors = named | dict(trainer.optimizer.named_state())
        with mock.patch("titanlite.checkpoint.state._page_lock", lambda arena: PINNED.add(arena.data_ptr())):
            self.copy.begin({name: local_part(each) for name, each in tensors.items()})
        return stats


def batch_of(config: JobConfig, rows: int, number: int) -> Batch:
    shape = rows, config.training.seq_len
    tokens, sources = (torch.zeros(each, dtype=torch.int64, device=CUDA) for each in (shape, rows))
    numbers = torch.arange(number * rows, (number + 1) * rows)
    positions = torch.zeros(shape, dtype=torch.int64, device=CUDA) if config.data.masks_documents else None
    return Batch(tokens, tokens, numbers, sources, positions, torch.full((rows,), shape[1]))


def kinds() -> dict[str, int]:
    """The waits that are noted for operations of each kind."""
    with FakeTensorMode(allow_non_fake_inputs=True), SPY:
        numbers, on_host = torch.zeros(4, device=CUDA), torch.zeros(4)
        pinned, is_positive = on_host.pin_memory(), numbers > 0
        operations: dict[str, Callable[[], object]] = {
            "item": lambda: numbers[0].item(),
            "if": lambda: bool(is_positive.any()),
            "tolist": numbers.tolist,
            "to the host": numbers.cpu,
            "to the host, asynchronously": lambda: on_host.copy_(numbers, non_blocking=True),
            "equal": lambda: torch.equal(numbers, numbers),
            "new from a list": lambda: torch.tensor([1.0], device=CUDA),
            "to the device": lambda: on_host.to(CUDA, non_blocking=True),
            "where with a scalar of the host": lambda: torch.where(is_positive, numbers, torch.zeros(())),
            "index of the host": lambda: numbers[torch.tensor([1, 2])],
            "synchronize": torch.cuda.synchronize,
            "none: to the device": lambda: pinned.to(CUDA, non_blocking=True),
            "none: to the host": lambda: pinned.copy_(numbers, non_blocking=True),
            "none: scalars": lambda: torch.where(is_positive, numbers, 0.0).add_(1.0).masked_fill_(is_positive, 2.0),
            "none: indexes": lambda: numbers[is_positive.long()],
            "none: of the host": lambda: (on_host + 1).nonzero().tolist(),
        }
        found = {}
        for name, operation in operations.items():
            SPY.waits.clear()
            operation()
            found[name] = SPY.waits.total()
        return found


def main(cases: Sequence[str]) -> None:
    with contextlib.ExitStack() as stack:
        change_torch(stack)
        print(json.dumps({"case": "kinds", "waits": kinds()}))
        for case in cases:
            begin, (ranks, *settings) = time.process_time(), case.split()
            try:
                found: dict[str, Any] = {"waits": waits_of(int(ranks), settings)}
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:400] + f"\n{traceback.format_exc()[-3000:]}"}
            print(json.dumps({"case": case, **found, "CPU s": round(time.process_time() - begin, 2)}), flush=True)


if __name__ == "__main__":
    main(sys.stdin.read().splitlines())
