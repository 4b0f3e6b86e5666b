"""What a rank of a rehearsal does: its collectives, the bytes of its living tensors by kind, its reads by the host."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.runtime.torch_internals import (
    TorchDispatchMode,
    group_of_operation,
    is_fake,
    is_host_read,
    operation_name,
    storage_key,
    tree_leaves,
)

Kind = Literal[
    "parameters", "gradients", "optimizer", "buffers", "data parallel", "pipeline", "update", "head", "activations"
]
"""Of the bytes at the peak. The first four are found by what holds them, the others by the code that made them."""
Held = Callable[[], Mapping[int, Kind]]
"""Kinds of storages by their key, of those that are found by what holds them."""

OPERATIONS = {
    "allgather_": ("all-gather", 0),
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
"""torch's operations: their name in the plan, and which argument is the full tensor of Traffic; -1: the result. Of
others, the first one counts."""
_NO_COLLECTIVES = {"wait_tensor", "recv_", "check_for_nan", "_wrap_tensor_autograd"}
_MAKERS: tuple[tuple[str, str, Kind], ...] = (
    ("distributed/fsdp/", "", "data parallel"),
    ("distributed/pipelining/", "recv", "pipeline"),  # the schedule also runs the model
    ("titanlite/optim/", "", "update"),
    ("titanlite/models/head.py", "", "head"),
    ("titanlite/models/losses.py", "", "head"),
)
"""Parts of a file's and a function's name, and the kind of what it makes."""
_GROWTH = 1.01
"""Of the peak, until its kinds are looked at again: to look takes milliseconds."""


class Recorder(TorchDispatchMode):
    """Counts the collectives by (group, operation), the bytes of living storages, and host reads by place.

    scalars: all-reduces of at most as many elements are those that the plan leaves out. rows_of_experts: what the host
    "reads" of the numbers of rows of experts. order: the collectives one after the other, as (group, operation, bytes),
    also the small ones. kinds: bytes by kind within 1 % of the peak.
    """

    def __init__(self, scalars: int, held: Held = dict) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scalars, self.held = scalars, held
        self.sizes: dict[int, int] = {}
        self.makers: dict[int, Kind] = {}
        self.live = self.peak = self._looked_at = 0
        self.kinds: Counter[Kind] = Counter()
        self.collectives: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.order: list[tuple[str, str, int]] = []
        self.host_reads: Counter[str] = Counter()
        self.rows_of_experts: list[list[int]] = []

    def start(self) -> None:
        """Begin a step: forget what was counted."""
        for counter in (self.collectives, self.bytes, self.host_reads, self.order):
            counter.clear()
        self.peak = self._looked_at = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if is_host_read(func) and is_fake(args[0]):
            self.read()
            return 1
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and operation_name(func) not in _NO_COLLECTIVES:
            self.count(operation_name(func), args, out)
        for tensor in tree_leaves((args, kwargs, out)):
            if is_fake(tensor):
                self.note(tensor)
        return out

    def read(self) -> None:
        """Count a host read by the place of the code that reads."""
        self.host_reads[place_of(sys._getframe(2))] += 1

    def count(self, name: str, args: Any, out: Any) -> None:
        """Count a collective. args, out: of torch's operation `name`."""
        operation, place = OPERATIONS.get(name, (name, 0))
        tensors = [each for each in tree_leaves(out if place < 0 else args[place]) if isinstance(each, Tensor)]
        group = group_of_operation(args)
        is_scalar = operation == "all-reduce" and sum(tensor.numel() for tensor in tensors) <= self.scalars
        if group.size() == 1:
            return
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.order.append((group.group_name, operation, size))
        if not is_scalar:
            self.collectives[group.group_name, operation] += 1
            self.bytes[group.group_name, operation] += size

    def note(self, tensor: Tensor) -> None:
        """Count the tensor's storage, if it is not one on the meta device, which has only shapes."""
        if tensor.device.type != "cpu":
            return
        key, size = storage_key(tensor), tensor.untyped_storage().nbytes()
        known = self.sizes.get(key)
        if known is None:
            weakref.finalize(tensor.untyped_storage(), self.free, key)
            self.makers[key] = _maker(sys._getframe(1))
        if known != size:
            self.sizes[key] = size
            self.live += size - (known or 0)
            self.peak = max(self.peak, self.live)
            if self.live > self._looked_at * _GROWTH:
                self._looked_at = self.live
                self.kinds = self.kinds_now()

    def kinds_now(self) -> Counter[Kind]:
        """Bytes of the living storages by kind."""
        held, found = self.held(), Counter[Kind]()
        for key, size in self.sizes.items():
            found[held.get(key, self.makers[key])] += size
        return found

    def free(self, key: int) -> None:
        self.live -= self.sizes.pop(key)
        del self.makers[key]


def place_of(frame: FrameType | None) -> str:
    """FOLDER/FILE.py of the code that calls an operation."""
    while frame is not None and _is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else "/".join(Path(frame.f_code.co_filename).parts[-2:])


def _is_machinery(file: str) -> bool:
    """Not of the program."""
    return "/torch/" in file or "/plan/rehearsal/" in file


def _maker(frame: FrameType | None) -> Kind:
    while frame is not None:
        code = frame.f_code
        for file, function, kind in _MAKERS:
            if file in code.co_filename and function in code.co_name:
                return kind
        frame = frame.f_back
    return "activations"
