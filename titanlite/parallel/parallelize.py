"""Application of all parallelisms to a model, in order; shared by all families."""

from titanlite.models.experts import Placement, mixtures_of
from titanlite.models.family import LanguageModel, Structure
from titanlite.models.head import LossComputation, LossConfig, output_layers_of
from titanlite.models.linear import use_own_products
from titanlite.parallel.compile import CompileConfig, apply_compile
from titanlite.parallel.context import apply_context_parallel
from titanlite.parallel.data import apply_data_parallel
from titanlite.parallel.expert import apply_expert_parallel
from titanlite.parallel.float8 import Float8Config, apply_float8, multiplies_on_device
from titanlite.parallel.mesh import Mesh, ModelDtypes, shard_logits
from titanlite.parallel.pipeline import logits_again, resolve_reshard_after_forward
from titanlite.parallel.recompute import ActivationCheckpointConfig, apply_recompute, inside_compilation
from titanlite.parallel.tensor import apply_tensor_parallel
from titanlite.runtime.torch_internals import clear_sharding_cache


def parallelize(
    model: LanguageModel,
    structure: Structure,
    mesh: Mesh,
    dtypes: ModelDtypes,
    *,
    loss: LossConfig,
    recompute: ActivationCheckpointConfig,
    compilation: CompileConfig,
    float8: Float8Config,
    bit_equal: bool = False,
) -> list[str]:
    """Apply context, expert, tensor and data parallelism, float8, recomputation and compilation, in place, on the meta
    device.

    model: the full model, or a pipeline stage with the structure of its units. mesh: connected. bit_equal: the same
    computation on any number of data ranks and stages, see parallel/exact.py.
    Returns descriptions of what was applied, in order, for the start log.
    """
    if mesh.world.size > 1:  # it imports torch._dynamo, as FSDP does
        clear_sharding_cache()
    computation = LossComputation(
        loss.chosen,
        loss.chunk_tokens,
        recomputes=logits_again(mesh.section, bit_equal=bit_equal) > 0,
        gathers_logits=not shard_logits(mesh.section, needs_logits=loss.chosen.needs_logits),
        further_weight=loss.further_tokens_weight if model.predicts_further else 0.0,
    )
    for head in output_layers_of([model]):
        head.computation = computation
    for name, index in structure.blocks.items():
        for mixture in mixtures_of([model.get_submodule(name)]):
            own_share = float(mesh.coordinate["tp"] == 0)  # all ranks of tp route the same positions
            mixture.placement = Placement(index, own_share, mesh.cp_group)
    on_device = multiplies_on_device(float8, mesh.device_mesh.device_type, dtypes.compute)
    if recompute.mode != "memory_budget":  # of torch's products, the compiler knows what they cost
        use_own_products(model.modules())
    recompute_first = inside_compilation(recompute)
    return [
        *apply_context_parallel(model, mesh.cp_group, mesh.section.context_parallel),
        *apply_expert_parallel(model, mesh.device_mesh, mesh.expert_mesh),
        *apply_tensor_parallel(model, mesh.device_mesh),
        *apply_float8(model, structure, float8, mesh.group("tp"), on_device=on_device),
        *(apply_recompute(model, structure, recompute) if recompute_first else []),
        *apply_compile(model, structure, compilation, mesh.device_mesh.device_type, dtypes.compute),
        *(apply_recompute(model, structure, recompute) if not recompute_first else []),
        *apply_data_parallel(
            model,
            structure,
            mesh.device_mesh,
            mesh.expert_mesh,
            dtypes,
            resolve_reshard_after_forward(mesh.section),
            keeps_sums=bit_equal,
        ),
    ]
