"""What a rehearsal replaces in the program, so that it runs on fake tensors: report.GAPS says what is therefore
not shown."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite import trainer
from titanlite.assembly import model as assembly
from titanlite.batch import count_sequences
from titanlite.models import attention, experts
from titanlite.models.decoder import Decoder
from titanlite.optim import owners
from titanlite.parallel import data, exact, expert, own_code
from titanlite.parallel.mesh import Mesh
from titanlite.runtime.torch_internals import (
    class_of_fakes,
    fsdp_parameters,
    is_dtensor,
    like_dtensor,
    module_of_fsdp_storages,
    real_tensors,
    shape_and_offset,
)
from titanlite.tools.plan.rehearsal.recorder import Recorder


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

    def as_all(found: list[Any], own: Any, group: dist.ProcessGroup | None = None) -> None:  # noqa: ARG001
        found[:] = [own] * len(found)

    def scaled(model: Decoder, embeddings: Tensor) -> Tensor:  # whose scale is rounded on the host, without a read
        scale = model.config.embedding_scale
        return embeddings if scale == 1 else embeddings * scale

    grouped = {"feed_forward": experts.grouped_feed_forward}  # as on a GPU
    storages = module_of_fsdp_storages()
    with ExitStack() as stack:
        replaced: list[tuple[Any, Mapping[str, Callable[..., Any]]]] = [
            (nn.Module, {"to_empty": to_empty}),
            (storages, {name: noted(getattr(storages, name)) for name in ("alloc_storage", "free_storage")}),
            (assembly, {"init_parameters_": lambda *_: None}),
            (Decoder, {"scaled": scaled}),
            (attention, {"attention_dtype": lambda _, dtype: dtype}),
            (data, {"replicates_at_once": lambda *_: False}),
            (experts, grouped),
            (own_code, grouped),
            (expert, {**grouped, "exchanged_feed_forward": equal_loads}),
            (owners, {"divisions": _really(owners.divisions)}),
            (Mesh, {"shard_groups": _really(Mesh.shard_groups)}),
            (trainer, {"count_sequences": _really(count_sequences)}),
            (class_of_fakes(), {"tolist": read}),
            (dist, {"all_gather_object": as_all}),
            (exact, {"shape_and_offset": _really(shape_and_offset)}),
        ]
        for owner, functions in replaced:
            stack.enter_context(_replaced(owner, functions))
        yield


@contextmanager
def _replaced(owner: Any, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions of a module or class."""
    own = {name: vars(owner).get(name) for name in functions}
    for name, function in functions.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for name, function in own.items():
            if function is None:  # inherited
                delattr(owner, name)
            else:
                setattr(owner, name, function)


def _really(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with real tensors, such as those that torch's DeviceMesh computes with."""

    @wraps(function)
    def call(*args: Any, **keys: Any) -> Any:
        with real_tensors():
            return function(*args, **keys)

    return call


def to_empty(module: nn.Module, *, device: torch.device) -> nn.Module:
    """nn.Module.to_empty, which cannot swap fake tensors."""
    new: dict[Tensor, Tensor] = {}

    def empty(tensor: Tensor) -> Tensor:
        if tensor not in new:
            local = tensor._local_tensor if is_dtensor(tensor) else tensor
            value = like_dtensor(tensor, torch.empty_like(local, device=device))
            new[tensor] = nn.Parameter(value) if isinstance(tensor, nn.Parameter) else value
        return new[tensor]

    for each in module.modules():
        tables: tuple[dict[str, Any], ...] = (each._parameters, each._buffers)
        for values in tables:
            values.update({name: empty(value) for name, value in values.items() if value is not None})
    for parameter in fsdp_parameters(module):
        parameter.reset_sharded_param()
    return module
