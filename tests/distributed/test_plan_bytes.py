"""The plan's bytes of parameters, gradients, optimizer state and buffers equal those of a running rank."""

import operator
from collections.abc import Sequence

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.configuration import HAS_EACH_SCHEDULE
from tests.distributed.gradients import build_on_mesh
from tests.distributed.reference import global_batch, rank_batches, small_config
from tests.pool import run_ranks
from tests.simulated import simulated_mesh
from titanlite.assembly.model import build_parts
from titanlite.models.family import copies_in, parameters_of
from titanlite.parallel.data import wrapped_modules
from titanlite.parallel.mesh import AXES
from titanlite.parallel.pipeline import holders_in
from titanlite.planning.memory_check import plan_memory
from titanlite.planning.stages import plan_stages

ADAMW = ["optimizer.name=AdamW"]
AVERAGE = [*ADAMW, "optimizer.ema_decay=0.9"]
UNEVEN = ["model.dim=36", "model.ffn_dim=52", "model.n_heads=2", *ADAMW]  # 131, 36 and 52 rows on 8 ranks
PIPELINE = ["parallelism.pp=2", "model.n_layers=6", *ADAMW]
BIT_EQUAL = ["training.bit_equal=true", "training.dtype=float32"]
MUON = ["optimizer.name=Muon"]
TIED = ["model.tie_embeddings=true"]

LAYOUTS: dict[int, list[list[str]]] = {
    1: [
        [],
        ADAMW,
        ["training.dtype=bfloat16", *ADAMW],
        ["training.dtype=float32", "training.mixed_precision_param=bfloat16", *ADAMW],
        [*TIED, *ADAMW],
        ["training.dtype=bfloat16", *AVERAGE],
        MUON,
        ["training.dtype=float32", "optimizer.name=Lion"],
        ["optimizer.momentum=0.9"],
        ["training.dtype=float32", "optimizer.state_dtype=bfloat16", *ADAMW],
        BIT_EQUAL,
    ],
    2: [
        ["parallelism.tp=2", *TIED, *AVERAGE],
        [*PIPELINE, "training.dtype=bfloat16", *AVERAGE],
        ["parallelism.tp=2", *MUON],
        ["parallelism.tp=2", *ADAMW],
        ["parallelism.tp=2", *TIED, *ADAMW],
        *([[*PIPELINE, "parallelism.pp_schedule=InterleavedZeroBubble"]] * HAS_EACH_SCHEDULE),
        PIPELINE,
        [*PIPELINE, *TIED],
        *([[*PIPELINE, *TIED, "parallelism.pp_schedule=ZBVZeroBubble"]] * HAS_EACH_SCHEDULE),
    ],
    4: [
        UNEVEN,
        [*TIED, "training.dtype=bfloat16", *ADAMW],
        ["parallelism.dp_replicate=2", *ADAMW],
        ["parallelism.dp_replicate=4", "parallelism.dp_shard=1"],
        ["parallelism.tp=2", *UNEVEN],
        [*PIPELINE, "parallelism.pp_schedule=Interleaved1F1B", "training.dtype=bfloat16"],
        [*PIPELINE, "parallelism.pp_split=[\"layers.1\"]", "parallelism.dp_shard=2", *TIED],
        [*BIT_EQUAL, *PIPELINE],
        [*BIT_EQUAL, *UNEVEN],
    ],
    8: [
        UNEVEN,
        [*PIPELINE, "parallelism.pp_schedule=Interleaved1F1B", "parallelism.tp=2"],
    ],
}  # fmt: skip


def size(tensors: Sequence[Tensor]) -> int:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def bytes_of_a_running_rank(layouts: list[tuple[str, ...]]) -> None:
    """Compare with the plan."""
    for settings in layouts:
        config = small_config(dist.get_world_size(), *settings)
        trainer, mesh = build_on_mesh(config)
        trainer.train_step(rank_batches(global_batch("uneven"), mesh.data_rank, mesh.data_degree, 1))
        parameters = [*parameters_of(trainer.model_parts).values()]
        gradients = [p.grad for p in parameters if p.grad is not None]
        assert len(gradients) == len(parameters)
        state = [*(value for _, value in trainer.optimizer.named_state()), *trainer.average.tensors.values()]
        buffers = [buffer for part in trainer.model_parts for buffer in part.buffers()]
        if trainer.exact is not None:
            numbers = vars(trainer.exact) | vars(trainer.exact._rows)
            buffers += [each for each in numbers.values() if isinstance(each, Tensor)]
        tensors = [value for value in state if isinstance(value, Tensor)]
        real = (size(parameters), size(gradients), size(tensors), size(buffers))
        memory = plan_memory(config, mesh)
        assert memory is not None
        planned = (memory.parameters, memory.gradients, memory.optimizer, memory.buffers)
        # that of coordinate 0 of the data and tp axes, which has at least as much as any other
        is_first = mesh.is_first(axis for axis in AXES if axis != "pp")
        fits = planned == real if is_first else all(map(operator.ge, planned, real))
        assert fits, (settings, planned, real)
        (optimizer, *others) = trainer.optimizer.optimizers
        if optimizer.defaults.get("fused") and not others:  # needs no memory itself
            largest = max((size([tensor]) for tensor in trainer.average.tensors.values()), default=0)
            is_exact = is_first and len(trainer.model_parts) == 1 and not holders_in(trainer.model_parts)
            assert memory.update == largest if is_exact else memory.update >= largest


@pytest.mark.parametrize(
    "world_size", [*(pytest.param(n, marks=pytest.mark.slow if n < 4 else pytest.mark.soak) for n in (1, 2, 4, 8))]
)
def test_bytes_match_a_running_rank(world_size: int) -> None:
    layouts = [("training.local_batch_size=1", *settings) for settings in LAYOUTS[world_size]]
    run_ranks(bytes_of_a_running_rank, world_size, layouts)


EXPERTS = ["model.family=qwen3_moe", *ADAMW]
PLANNED = [
    *((size, layout) for size, layouts in LAYOUTS.items() for layout in layouts),
    (4, ["parallelism.cp=2"]),
    (4, [*EXPERTS, "parallelism.ep=2", "parallelism.tp=2", "parallelism.dp_shard=2"]),
    (8, [*EXPERTS, "parallelism.ep=4", "parallelism.cp=2", "model.bias_rate=1e-3"]),
    (6, [*EXPERTS, "data.num_streams=6"]),
    (4, [*EXPERTS, *PIPELINE, "parallelism.ep=2", "model.bias_rate=1e-3"]),
    (2, ["model.family=olmoe", "parallelism.tp=2"]),
    (4, ["model.family=gpt_oss", *ADAMW, "parallelism.ep=2", "parallelism.tp=2", "parallelism.dp_shard=2", *MUON]),
    (2, ["model.family=qwen3", "parallelism.tp=2"]),
    (4, [*EXPERTS, "parallelism.ep=2", "parallelism.tp=2", "parallelism.dp_shard=2", *MUON]),
    (6, [*EXPERTS, "data.num_streams=6", *MUON]),
    (8, [*UNEVEN, "parallelism.dp_replicate=2", *MUON]),
]


@pytest.mark.parametrize(("world_size", "layout"), PLANNED)
def test_planned_stages_are_those_of_the_first_ranks(world_size: int, layout: list[str]) -> None:
    config = small_config(world_size, "training.local_batch_size=1", *layout)
    for pp_rank in range(config.parallelism.pp):
        with simulated_mesh(config, world_size, pp_rank * (world_size // config.parallelism.pp)) as mesh:
            planned = plan_stages(config, mesh.degrees)
            found: set[str] = set()
            for part in build_parts(config, mesh):
                stage, parameters = planned[part.stage], dict(part.model.named_parameters())
                own = {name: each for name, each in parameters.items() if name not in found}
                found |= {*own}
                assert stage.parameter_bytes == size([*own.values()])
                counted = own.keys() - copies_in([part.model], pp_rank)
                assert stage.num_parameters == sum(parameters[name].numel() for name in counted)
                assert stage.blocks == tuple(part.structure.blocks.values())
                assert stage.wrapped == (next(wrapped_modules(part.model), None) is not None)
