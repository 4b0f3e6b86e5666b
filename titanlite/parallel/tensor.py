"""Tensor parallelism with sequence parallelism, by the tensor styles of a family's plan."""

import inspect
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from titanlite.models.family import LanguageModel, Plan, TensorStyle

_SEQUENCE = Shard(1)
_HEADS_DIM = 2


def apply_tensor_parallel(model: LanguageModel, plan: Plan, mesh: DeviceMesh) -> list[str]:
    """Shard the model's parameters over the tp axis, in place; return descriptions for the start log.

    Between blocks, activations are (batch, seq_len / tp, dim) on each rank. Backward
    sums the gradients of replicated parameters (norms) over tp, since each rank computes a part of the positions or of
    the heads.
    """
    axis = mesh["tp"]
    if axis.size() == 1:
        return []
    for name, module in list(model.named_modules()):
        style = tensor_style(plan, name)
        if style is not None:
            parallelize_module(module, axis, _torch_style(style, module))
        if style == "vocabulary":
            # Its output is a pending collective, which a compiled block's backward cannot take; clone waits for it.
            module.register_forward_hook(lambda _module, _args, output: output.clone())
    model.tie_weights()
    left_out = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    assert not left_out, f"the plan has no tensor style for {left_out}"
    return ["tensor parallel"]


def tensor_style(plan: Plan, name: str) -> TensorStyle | None:
    """Style of the submodule `name` in the plan; None if it has no style."""
    for pattern, style in plan.tensor_styles.items():
        if fnmatchcase(name, pattern) and name.count(".") == pattern.count("."):
            return style
    return None


def _torch_style(style: TensorStyle, module: nn.Module) -> ParallelStyle:
    match style:
        case "vocabulary":
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=_SEQUENCE)
        case "norm":
            return SequenceParallel()
        case "head_norm":
            # Declare the input as sharded over heads, so that backward sums the weight's gradient over tp.
            return SequenceParallel(sequence_dim=_HEADS_DIM, use_local_output=True)
        case "gather":
            others = (None,) * (len(inspect.signature(module.forward).parameters) - 1)
            return PrepareModuleInput(input_layouts=(_SEQUENCE, *others), desired_input_layouts=(Replicate(), *others))
        case "column":
            return ColwiseParallel()
        case "row":
            return RowwiseParallel(output_layouts=_SEQUENCE)
        case "logits":
            return _Head()


class _Head(ParallelStyle):
    """The output layer: its weight is sharded by rows, its input gathered along the sequence.

    The layer computes with plain tensors. Each rank's gradient of the input is a part of a sum, from its ids.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._shard_weight, self._gather_input)  # type: ignore[arg-type]

    @staticmethod
    def _shard_weight(name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:  # noqa: ARG004
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, device_mesh, [Shard(0)])))

    @staticmethod
    def _gather_input(module: nn.Module, inputs: tuple[Any, ...], device_mesh: DeviceMesh) -> tuple[Any, ...]:  # noqa: ARG004
        x = inputs[0]
        if not isinstance(x, DTensor):  # torch's norm style returns a DTensor
            x = DTensor.from_local(x, device_mesh, [_SEQUENCE], run_check=False)
        gathered = x.redistribute(device_mesh, [Replicate()])
        return gathered.to_local(grad_placements=[Partial()]), *inputs[1:]
