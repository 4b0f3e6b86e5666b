"""Tensor parallelism with sequence parallelism, by the tensor styles of a family's plan."""

import inspect
import warnings
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from titanlite.models.family import LanguageModel, Plan, TensorStyle

_SEQUENCE = Shard(1)
_HEADS_DIM = 2


def apply_tensor_parallel(model: LanguageModel, plan: Plan, mesh: DeviceMesh, *, shard_logits: bool) -> list[str]:
    """Shard the model's parameters over the tp axis, in place; return descriptions for the start log.

    Between blocks, activations are (batch, seq_len / tp, dim) on each rank. With `shard_logits`, the logits are a
    DTensor sharded along the vocabulary, for use in `parallel_loss`; otherwise every rank has all of them. Backward
    sums the gradients of replicated parameters (norms) over tp, since each rank computes a part of the positions or of
    the heads.
    """
    axis = mesh["tp"]
    if axis.size() == 1:
        return []
    for name, module in list(model.named_modules()):
        style = tensor_style(plan, name)
        if style is not None:
            parallelize_module(module, axis, _torch_style(style, module, shard_logits))
        if style == "vocabulary":
            # Its output is a pending collective, which a compiled block's backward cannot take; clone waits for it.
            module.register_forward_hook(lambda _module, _args, output: output.clone())
    if not shard_logits:
        # The gathered logits are a view of a DTensor's local tensor, and no code changes them in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    model.tie_weights()
    left_out = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    assert not left_out, f"the plan has no tensor style for {left_out}"
    return ["tensor parallel with loss parallel" if shard_logits else "tensor parallel"]


def tensor_style(plan: Plan, name: str) -> TensorStyle | None:
    """Style of the submodule `name` in the plan; None if it has no style."""
    for pattern, style in plan.tensor_styles.items():
        if fnmatchcase(name, pattern) and name.count(".") == pattern.count("."):
            return style
    return None


def parallel_loss(*, shard_logits: bool) -> AbstractContextManager[None]:
    """Context in which cross-entropy and its backward accept logits sharded along the vocabulary."""
    context: AbstractContextManager[None] = loss_parallel() if shard_logits else nullcontext()
    return context


def _torch_style(style: TensorStyle, module: nn.Module, shard_logits: bool) -> ParallelStyle:
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
            return ColwiseParallel(
                input_layouts=_SEQUENCE,
                output_layouts=Shard(-1) if shard_logits else Replicate(),
                use_local_output=not shard_logits,
            )
