"""Tensor parallelism with sequence parallelism, by the types of the modules (models/parts.py).

Parameters are DTensors. The modules compute with plain tensors, this rank's parts of the parameters, and exchange
activations explicitly: each operation on DTensors would cost a tenth of a millisecond, forward and backward.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from titanlite.models.experts import Experts, MixtureOfExperts, Router, router_scores
from titanlite.models.family import LanguageModel, has_own
from titanlite.models.head import OutputLayer
from titanlite.models.layers import OfHeads, RMSNorm, Scalar, WholeRows, WideNorm, rms_norm, rms_norm_of_part
from titanlite.models.linear import layer_linear
from titanlite.models.parts import Column, OwnPositions, Row, RowPart, gathers
from titanlite.parallel.collectives import all_gather, all_reduce, reduce_scatter


def apply_tensor_parallel(model: LanguageModel, mesh: DeviceMesh) -> list[str]:
    """Shard the model's parameters over the tp axis, in place; return descriptions for the start log.

    Between blocks, activations are (batch, seq_len / tp, dim) on each rank. Names of parameters do not change. The
    gradients of replicated parameters (norms) are parts of sums over tp, since each rank computes a part of the
    positions or of the heads; data parallelism adds them up. The model must have no `form_problems`.
    """
    axis = mesh["tp"]
    if axis.size() == 1:
        return []
    for module in list(model.modules()):
        if gathers(module):
            module.register_forward_pre_hook(partial(_gather_input, group=axis.get_group()))
        if (kind := form_of(module)) is not None:
            _apply(module, FORMS[kind], axis)
    model.tie_weights()
    return ["tensor parallel"]


def form_of(module: nn.Module) -> type[nn.Module] | None:
    """The type in FORMS that a module is of; None: none."""
    return next((kind for kind in type(module).__mro__ if kind in FORMS), None)


def tensor_dimension(module: nn.Module, parameter: str) -> int | None:
    """The dimension along which tp shards this parameter of a module; None: it is replicated."""
    kind = form_of(module)
    assert kind is not None, f"{type(module).__name__} has no form over tp"
    placement = FORMS[kind][0][parameter]
    return placement.dim if isinstance(placement, Shard) else None


def form_problems(model: nn.Module, tp: int) -> list[str]:
    """Why tensor parallelism of this degree cannot be applied to a full model as it was built; empty if it can."""
    problems, modules = [], dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        own, what = [key for key, _ in module.named_parameters(recurse=False)], type(module).__name__
        outer = next((each for each in _around(name) if gathers(modules[each])), None)
        if gathers(module) and outer is not None:
            problems.append(
                f"{name} gathers its input inside of {outer}, which has gathered it (write gathers = False)"
            )
        kind = Experts if isinstance(module, Experts) else form_of(module)
        if kind is None:
            remedy = "build it of titanlite.models.parts: Column and Row, or OwnPositions, or Scalar of models.layers"
            problems += [f"{name}.{key} is a parameter of {what}, which tp cannot cut ({remedy})" for key in own[:1]]
            continue
        if kind is Column and outer is None and not any(_has_whole_rows(modules[each]) for each in _around(name)):
            remedy = "write gathers = True in the class of the module that is called with one part of the positions"
            problems.append(f"{name} is a Column, and no module around it gathers its input ({remedy})")
        if kind is RowPart and not any(isinstance(modules[each], MixtureOfExperts) for each in _around(name)):
            problems.append(f"{name} is a RowPart, and no mixture of experts around it adds up its parts (build a Row)")
        placements, forward = FORMS.get(kind, (dict.fromkeys(own), _none))
        expected = [key for key in placements if key != "bias" or getattr(module, "bias", None) is not None]
        if own != expected:
            problems.append(f"{name}: a {kind.__name__} has {', '.join(expected)}, not {', '.join(own)}")
        elif forward is not None and has_own(module, "forward", kind):
            problems.append(f"{name}: tensor parallelism would replace the forward of {what}")
        else:
            problems += _uneven_problems(name, module, placements, tp)
    return problems


def _uneven_problems(name: str, module: nn.Module, placements: Mapping[str, Placement | None], tp: int) -> list[str]:
    """Parameters of which ranks would have parts of different sizes, as only those of a vocabulary may be."""
    if isinstance(module, nn.Embedding | OutputLayer):
        return []
    sizes = {
        key: parameter.shape[placement.dim]
        for key, parameter in module.named_parameters(recurse=False)
        if isinstance(placement := placements[key], Shard)
    }
    rule = f"which tp = {tp} does not divide"
    return [f"tp cuts {name}.{key} along {size} numbers, {rule}" for key, size in sizes.items() if size % tp][:1]


def _around(name: str) -> list[str]:
    """The names of the modules that have the module `name`."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _has_whole_rows(module: nn.Module) -> bool:
    return any(isinstance(child, WholeRows) for child in module.children())


def _none(*_: Any) -> None:
    """In place of the forward of experts, which expert parallelism replaces."""


def _apply(module: nn.Module, form: "Form", axis: DeviceMesh) -> None:
    placements, forward = form
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(distribute_tensor(parameter, axis, [placements[name]])))
    if forward is not None:
        module.tp_group = axis.get_group()  # type: ignore[assignment]
        # A method, since torch's compiler would compile each block anew for a partial function.
        module.forward = MethodType(forward, module)


def _group(module: nn.Module) -> dist.ProcessGroup:
    group: Any = module.tp_group
    assert isinstance(group, dist.ProcessGroup)
    return group


def _look_up(embedding: nn.Embedding, tokens: Tensor) -> Tensor:
    weight, group = local_weight(embedding.weight), _group(embedding)
    rows = -(-embedding.num_embeddings // group.size())
    ids = tokens - rows * group.rank()
    elsewhere = (ids < 0) | (ids >= len(weight))
    found = functional.embedding(ids.masked_fill(elsewhere, 0), weight)
    return summed_part(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), group)


def _normalize(norm: RMSNorm, x: Tensor) -> Tensor:
    return rms_norm(x, norm.factor(local_weight(norm.weight, Partial())), norm.eps)


def _normalize_together(norm: WideNorm, x: Tensor) -> Tensor:
    group = _group(norm)
    total = partial(all_reduce, group=group)
    weight = norm.factor(local_weight(norm.weight))
    return rms_norm_of_part(x.flatten(2), weight, norm.eps, group.size(), total).view_as(x)


def _whole_rows(module: WholeRows, *parts: Tensor) -> tuple[Tensor, ...]:
    joined: Tensor = _GatherSequence.apply(torch.cat(parts, dim=-1), _group(module))  # type: ignore[no-untyped-call]
    return torch.split(joined, [part.shape[-1] for part in parts], dim=-1)


def _project_own_positions(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer_linear(layer, x, local_weight(layer.weight, Partial()), _local_bias(layer, Partial()))


def _project(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer_linear(layer, x, local_weight(layer.weight), _local_bias(layer, Shard(0)))


def _project_features(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer_linear(layer, x, local_weight(layer.weight))


def _project_and_sum(layer: nn.Linear, x: Tensor) -> Tensor:
    out = summed_part(_project_features(layer, x), _group(layer))
    # Each rank adds the bias to its own positions: once, and its gradient is a part of a sum.
    bias = _local_bias(layer, Partial())
    return out if bias is None else out + bias


def _route(router: Router, x: Tensor) -> Tensor:
    # Its gradient comes through this rank's part of the experts: a part of a sum.
    return router_scores(x, local_weight(router.weight, Partial()), _local_bias(router, Partial()))


def _read(scalar: Scalar) -> Tensor:
    return local_weight(scalar.weight, Partial())


def _read_own(scalar: Scalar) -> Tensor:
    return local_weight(scalar.weight)


Form = tuple[dict[str, Placement], Callable[..., Any] | None]

FORMS: dict[type[nn.Module], Form] = {
    nn.Embedding: ({"weight": Shard(0)}, _look_up),
    RMSNorm: ({"weight": Replicate()}, _normalize),
    WideNorm: ({"weight": Shard(0)}, _normalize_together),
    WholeRows: ({}, _whole_rows),
    OwnPositions: ({"weight": Replicate(), "bias": Replicate()}, _project_own_positions),
    Column: ({"weight": Shard(0), "bias": Shard(0)}, _project),
    Row: ({"weight": Shard(1), "bias": Replicate()}, _project_and_sum),
    RowPart: ({"weight": Shard(1)}, _project_features),
    Router: ({"weight": Replicate(), "bias": Replicate()}, _route),
    Scalar: ({"weight": Replicate()}, _read),
    OfHeads: ({"weight": Shard(0)}, _read_own),
    OutputLayer: ({"weight": Shard(0)}, None),
}
"""Type -> placements of its parameters over tp, and its forward (None: it keeps its own). A module whose forward is
replaced must have that of its type: see form_problems."""


def local_weight(weight: Tensor, gradient: Placement | None = None) -> Tensor:
    """This rank's part of a weight. gradient: its placement, by default that of the weight."""
    assert isinstance(weight, DTensor)
    local: Tensor = weight.to_local(grad_placements=None if gradient is None else [gradient])
    return local


def _local_bias(layer: nn.Linear, gradient: Placement) -> Tensor | None:
    return None if layer.bias is None else local_weight(layer.bias, gradient)


def _gather_input(_module: nn.Module, args: tuple[Any, ...], group: dist.ProcessGroup) -> tuple[Any, ...]:
    """Gather the first argument along the sequence. Its gradients on the ranks are parts of a sum."""
    return _GatherSequence.apply(args[0], group), *args[1:]  # type: ignore[no-untyped-call]


def summed_part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum `x`, (batch, seq_len, dim), over the ranks; returns this rank's part of the sequence."""
    part: Tensor = _ScatterSequence.apply(x, group)  # type: ignore[no-untyped-call]
    return part


class _GatherSequence(torch.autograd.Function):
    """All-gather along the sequence: (batch, seq_len / tp, dim) -> (batch, seq_len, dim)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _scatter_sequence(gradient, ctx.group), None


class _ScatterSequence(torch.autograd.Function):
    """Reduce-scatter along the sequence: (batch, seq_len, dim) -> (batch, seq_len / tp, dim)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gather_sequence(gradient, ctx.group), None


def _gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered = all_gather(x, group)
    if len(x) == 1:
        return gathered.reshape(1, -1, *x.shape[2:])  # no copy
    return torch.cat(gathered.chunk(group.size()), dim=1)


def _scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if len(x) == 1:
        return reduce_scatter(x.reshape(group.size(), -1, *x.shape[2:]), group)
    return reduce_scatter(torch.cat(x.chunk(group.size(), dim=1)), group)
