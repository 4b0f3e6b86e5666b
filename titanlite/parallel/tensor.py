"""Tensor parallelism with sequence parallelism, by the tensor styles of a family's structure.

Parameters are DTensors. The modules compute with plain tensors, this rank's parts of the parameters, and exchange
activations explicitly: each operation on DTensors would cost a tenth of a millisecond, forward and backward.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from titanlite.models.experts import Experts, Router, router_scores
from titanlite.models.family import LanguageModel, Structure, TensorStyle, has_own
from titanlite.models.layers import RMSNorm, Scalar, WholeRows, WideNorm, rms_norm, rms_norm_of_part
from titanlite.models.linear import layer_linear
from titanlite.parallel.collectives import all_gather, all_reduce, reduce_scatter


def apply_tensor_parallel(model: LanguageModel, structure: Structure, mesh: DeviceMesh) -> list[str]:
    """Shard the model's parameters over the tp axis, in place; return descriptions for the start log.

    Between blocks, activations are (batch, seq_len / tp, dim) on each rank. Names of parameters do not change. The
    gradients of replicated parameters (norms) are parts of sums over tp, since each rank computes a part of the
    positions or of the heads; data parallelism adds them up. The model must have no `style_problems`.
    """
    axis = mesh["tp"]
    if axis.size() == 1:
        return []
    for name, module in list(model.named_modules()):
        style = tensor_style(structure, name)
        if style is not None:
            _apply(style, module, axis)
    model.tie_weights()
    return ["tensor parallel"]


def tensor_style(structure: Structure, name: str) -> TensorStyle | None:
    """Style of the submodule `name` in the structure; None if it has no style."""
    return next((style for pattern, style in structure.tensor_styles.items() if _matches(name, pattern)), None)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")


def tensor_dimension(structure: Structure, module: str, parameter: str) -> int | None:
    """The dimension along which tp shards this parameter of a module with a tensor style; None: it is replicated."""
    style = tensor_style(structure, module)
    assert style is not None, f"the structure has no tensor style for {module}"
    placement = _STYLES[style][1][parameter]
    return placement.dim if isinstance(placement, Shard) else None


def style_problems(model: nn.Module, structure: Structure) -> list[str]:
    """Why tensor parallelism cannot be applied to a full model as it was built; empty if it can."""
    styles = ("gather", *_STYLES)
    unknown = [f'{pattern}: "{style}"' for pattern, style in structure.tensor_styles.items() if style not in styles]
    if unknown:
        return [f"{each} is no tensor style; they are {', '.join(styles)}" for each in unknown]
    modules = dict(model.named_modules(remove_duplicate=False))
    patterns = (each for each in structure.tensor_styles if not any(_matches(name, each) for name in modules))
    problems = [f"tensor_styles has {pattern}, which the model does not have" for pattern in patterns]
    kind: type[nn.Module]
    for name, module in modules.items():
        style, own = tensor_style(structure, name), [key for key, _ in module.named_parameters(recurse=False)]
        if isinstance(module, Experts):
            kind, parameters, replaces = Experts, own, True
        elif style is None or style == "gather":
            problems += [f"the structure has no tensor style for {name}.{key}" for key in own]
            continue
        else:
            kind, placements, forward = _STYLES[style]
            no_bias = isinstance(module, nn.Linear) and module.bias is None
            parameters = [key for key in placements if key != "bias" or not no_bias]
            replaces = forward is not None
        if not isinstance(module, kind):
            problems.append(f'{name}: tensor style "{style}" is for {kind.__name__}, not {type(module).__name__}')
        elif own != parameters:
            problems.append(f'{name}: tensor style "{style}" is for {", ".join(parameters)}, not {", ".join(own)}')
        elif replaces and has_own(module, "forward", kind):
            problems.append(f"{name}: tensor parallelism would replace the forward of {type(module).__name__}")
    return problems


def _apply(style: TensorStyle, module: nn.Module, axis: DeviceMesh) -> None:
    if style in ("gather", "logits"):
        module.register_forward_pre_hook(partial(_gather_input, group=axis.get_group()))
    if style == "gather":
        return
    _, placements, forward = _STYLES[style]
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


_STYLES: dict[TensorStyle, tuple[type[nn.Module], dict[str, Placement], Callable[..., Any] | None]] = {
    "vocabulary": (nn.Embedding, {"weight": Shard(0)}, _look_up),
    "norm": (RMSNorm, {"weight": Replicate()}, _normalize),
    "head_norm": (RMSNorm, {"weight": Replicate()}, _normalize),
    "wide_norm": (WideNorm, {"weight": Shard(0)}, _normalize_together),
    "whole_rows": (WholeRows, {}, _whole_rows),
    "positions": (nn.Linear, {"weight": Replicate(), "bias": Replicate()}, _project_own_positions),
    "column": (nn.Linear, {"weight": Shard(0), "bias": Shard(0)}, _project),
    "row": (nn.Linear, {"weight": Shard(1), "bias": Replicate()}, _project_and_sum),
    "row_part": (nn.Linear, {"weight": Shard(1)}, _project_features),
    "router": (Router, {"weight": Replicate(), "bias": Replicate()}, _route),
    "scalar": (Scalar, {"weight": Replicate()}, _read),
    "heads": (Scalar, {"weight": Shard(0)}, _read_own),
    "logits": (nn.Linear, {"weight": Shard(0)}, None),
}
"""Style -> type of the module, placements of its parameters over tp, and its forward (None: it keeps its own). A module
whose forward is replaced must have that of its type: see style_problems."""


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
