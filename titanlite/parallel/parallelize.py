"""Application of all parallelisms to a model, in order; shared by all families."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanlite.models.experts import MixtureOfExperts
from titanlite.models.family import LanguageModel, Plan
from titanlite.models.head import LossConfig, OutputLayer
from titanlite.parallel.compile import CompileConfig, apply_compile
from titanlite.parallel.context import apply_context_parallel
from titanlite.parallel.data import apply_data_parallel
from titanlite.parallel.mesh import ContextParallel, ReshardAfterForward
from titanlite.parallel.recompute import ActivationCheckpointConfig, apply_recompute, inside_compilation
from titanlite.parallel.tensor import apply_tensor_parallel


def parallelize(
    model: LanguageModel,
    plan: Plan,
    mesh: DeviceMesh,
    cp_group: dist.ProcessGroup | None,
    *,
    context_parallel: ContextParallel,
    rows_per_step: int,
    shard_logits: bool,
    loss: LossConfig,
    recompute: ActivationCheckpointConfig,
    compilation: CompileConfig,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: ReshardAfterForward,
) -> list[str]:
    """Apply context, tensor and data parallelism, recomputation and compilation, in place, on the meta device.

    model: the full model, or a pipeline stage with the plan of its units. cp_group: of the ranks that hold other
    positions of the same rows, if there are any. rows_per_step: rows of the global batch. Computes in `param_dtype`,
    reduces gradients in `reduce_dtype`.
    Returns descriptions of what was applied, in order, for the start log.
    """
    for head in (module for module in model.modules() if isinstance(module, OutputLayer)):
        head.chunk_tokens = loss.chunk_tokens
        # A pipeline has several microbatches in flight: the gradients of each would take too much memory.
        head.recomputes = mesh["pp"].size() > 1
        head.gathers_logits = not shard_logits
    for name, index in plan.blocks.items():
        for mixture in model.get_submodule(name).modules():
            if isinstance(mixture, MixtureOfExperts):
                mixture.block, mixture.rows_per_step, mixture.row_group = index, rows_per_step, cp_group
                mixture.own_share = float(mesh["tp"].get_local_rank() == 0)  # all ranks of tp route the same positions
    recompute_first = inside_compilation(recompute)
    return [
        *apply_context_parallel(model, cp_group, context_parallel),
        *apply_tensor_parallel(model, plan, mesh),
        *(apply_recompute(model, plan, recompute) if recompute_first else []),
        *apply_compile(model, plan, compilation),
        *(apply_recompute(model, plan, recompute) if not recompute_first else []),
        *apply_data_parallel(
            model,
            plan,
            mesh,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            reshard_after_forward=reshard_after_forward,
        ),
    ]
