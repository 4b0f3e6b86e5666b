"""What parallelize applies to the output layer, what is chosen by device and size, the division of a step."""

from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from tests.configuration import EACH_SCHEDULE
from tests.distributed.layouts import DEEPSEEK_V3, EXPERTS, GPT_OSS, depth
from tests.distributed.reference import small_config
from tests.grouped import grouped_products
from tests.simulated import simulated_mesh
from titanlite.assembly.job import job_of
from titanlite.assembly.model import build_parts
from titanlite.models.experts import mixtures_of
from titanlite.models.family import resolve_model
from titanlite.models.head import OutputLayer
from titanlite.models.llama3 import LLAMA3, Llama3, Llama3Config
from titanlite.models.parts import Column, Row
from titanlite.parallel.compile import CompileConfig, apply_compile
from titanlite.parallel.data import AT_ONCE_BYTES, replicates_at_once
from titanlite.parallel.mesh import Mesh, PipelineSchedule
from titanlite.parallel.microbatches import Microbatches
from titanlite.parallel.pipeline import fits_schedule
from titanlite.parallel.recompute import ActivationCheckpointConfig, apply_recompute
from titanlite.runtime.torch_internals import compiled_graphs, is_dtensor, reset_compiler

MORE = (("qwen3_moe", "aot_eager", "full", 2), ("gpt_oss", "aot_eager", "full", 3), ("qwen3_moe", "inductor", "op", 2))
BUDGET = ["activation_checkpoint.mode=memory_budget", "compile.enable=true", "compile.backend=aot_eager"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["loss.chunk_tokens=7"], (7, False, True)),
        (["loss.chunk_tokens=7", "parallelism.tp=2"], (7, False, False)),
        (["parallelism.pp=2"], ("auto", False, True)),
        (["parallelism.pp_schedule=GPipe", "parallelism.pp=2"], ("auto", True, True)),
    ],
)
def test_the_loss_is_computed_as_configured(settings: list[str], expected: tuple[Any, ...]) -> None:
    world_size = 2 if "parallelism" in settings[-1] or len(settings) == 2 else 1
    config = small_config(world_size, *settings)
    with simulated_mesh(config, world_size, rank=world_size - 1) as mesh:
        modules = [module for part in build_parts(config, mesh) for module in part.model.modules()]
    (head,) = (module for module in modules if isinstance(module, OutputLayer))
    how = head.computation
    assert (how.chunk_tokens, how.recomputes, how.gathers_logits) == expected


def test_parameters_are_on_the_mesh_of_their_run() -> None:
    """Also the second time: DTensor's cache would give those of the first mesh, and ranks that have not cached the same
    shapes would wait for each other in different groups."""
    config = small_config(4, "parallelism.tp=2", "parallelism.dp_shard=2")
    with simulated_mesh(config, 4) as mesh:
        for each in (mesh, Mesh(config.parallelism, mesh.world)):
            if each is not mesh:
                each.connect(None)
            (part,) = build_parts(config, each)
            own = [each.group(axis).group_name for axis in ("dp_shard", "tp")]
            for parameter in part.model.parameters():
                assert is_dtensor(parameter)
                found = parameter.device_mesh
                assert [found.get_group(axis).group_name for axis in ("dp_shard", "tp")] == own


@pytest.mark.parametrize("settings", [[], ["parallelism.tp=2"], BUDGET])
def test_linear_layers_have_titanlites_products(settings: list[str]) -> None:
    """Unless the compiler must know what they cost."""
    world_size = 2 if "parallelism.tp=2" in settings else 1
    config = small_config(world_size, *settings)
    with simulated_mesh(config, world_size, rank=0) as mesh:
        modules = [module for part in build_parts(config, mesh) for module in part.model.modules()]
    layers = [module for module in modules if isinstance(module, Column | Row)]
    assert len(layers) == 7 * config.hyper_parameters.n_layers
    assert {"forward" in vars(layer) for layer in layers} == {settings is not BUDGET}


def test_the_loss_is_compiled_if_configured() -> None:
    config = Llama3Config(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=80, vocab_size=50, max_seq_len=32)
    model, counter = Llama3(config), CompileCounter()
    section = CompileConfig(enable=True, backend=cast("Any", counter))
    lines = apply_compile(model, LLAMA3.structure(config), section)
    assert [line.partition(" to ")[2] for line in lines] == ["the loss", "each block"]
    (head,) = (module for module in model.modules() if isinstance(module, OutputLayer))
    head(torch.randn(1, 4, 32), torch.zeros(1, 4, dtype=torch.int64), torch.tensor([4]))
    assert counter.frame_count == 1


def test_blocks_with_experts_for_which_the_host_waits_are_not_compiled() -> None:
    family, config = resolve_model(small_config(1, *EXPERTS).model)
    model = family.build(config)
    before = [block.forward for block in model.layers.values()]
    lines = apply_compile(model, family.structure(config), CompileConfig(enable=True, backend="eager"))
    assert lines[-1].endswith("to 0 of 2 blocks: not to those with experts for which the host waits")
    assert [block.forward for block in model.layers.values()] == before


def step_of(family: str, backend: str, policy: str) -> tuple[list[Tensor], list[Tensor], tuple[int, int]]:
    """Gradients and loads of experts of two microbatches that are computed at the same time, with padding; graphs of
    the blocks and the loss, and breaks. backend: "": not compiled."""
    settings = {"qwen3_moe": EXPERTS, "deepseek_v3": DEEPSEEK_V3, "gpt_oss": GPT_OSS}[family]
    loaded, config = resolve_model(small_config(1, *settings, *depth(3)).model)
    torch.manual_seed(0)
    model, structure = loaded.build(config).to(torch.float64), loaded.structure(config)
    model.init_buffers(torch.device("cpu"))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    recompute = ActivationCheckpointConfig(mode="selective" if policy == "op" else "full")
    reset_compiler()
    counters.clear()
    if policy == "op":
        apply_recompute(model, structure, recompute)
    lines = apply_compile(model, structure, CompileConfig(enable=backend != "", backend=backend))
    assert not backend or lines[-1].endswith(" to each block")
    if policy == "full":
        apply_recompute(model, structure, recompute)
    mixtures = mixtures_of([model])
    for mixture in mixtures:
        mixture.start_step(4, 64)
    tokens = torch.randint(config.vocab_size, (2, 2, 16))
    arguments = {"num_valid": torch.full((2,), 64), "is_token": torch.arange(32).view(2, 16) < 30}
    sum(model(each, labels=each, **arguments).sum() for each in tokens).backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    assert all(mixture.step_load is not None and len(mixture.step_sums) == 2 for mixture in mixtures)
    return gradients, [each.step_load for each in mixtures if each.step_load is not None], compiled_graphs()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.parametrize(
    ("family", "backend", "policy", "graphs"),
    [("deepseek_v3", "aot_eager", "op", 3), *(pytest.param(*each, marks=pytest.mark.soak) for each in MORE)],
)
def test_blocks_with_experts_are_one_graph(family: str, backend: str, policy: str, graphs: int) -> None:
    with grouped_products():
        expected, loads, _ = step_of(family, "", policy)
        found, compiled_loads, count = step_of(family, backend, policy)
    assert count == (graphs, 0)
    assert torch.equal(torch.stack(compiled_loads), torch.stack(loads))
    for one, other in zip(found, expected, strict=True):
        assert ((one - other).norm() / other.norm()).item() < 1e-12


def test_only_small_models_on_a_cpu_are_reduced_at_once() -> None:
    assert replicates_at_once("cpu", AT_ONCE_BYTES)
    assert not replicates_at_once("cpu", AT_ONCE_BYTES + 1)
    assert not replicates_at_once("cuda", 1)


SIXTEEN = "training.global_batch_size=16"


def divided(degree: int, *settings: str, pp: int = 1) -> Microbatches:
    layout = f"parallelism.dp_shard={degree}", f"parallelism.pp={pp}"
    return job_of(small_config(degree * pp, SIXTEEN, *layout, *settings), degree * pp).step


@pytest.mark.parametrize(
    ("degree", "local_batch_size", "size", "batches", "filler_rows"),
    [
        (1, 16, 16, 1, 0),
        (2, 4, 4, 2, 0),
        (3, 4, 3, 2, 2),  # 6, 5 and 5 sequences: two microbatches of 3, not of 4
        (5, 8, 4, 1, 4),
        (7, 1, 1, 3, 5),
        (1, 7, 6, 3, 2),
    ],
)
def test_equal_microbatches(degree: int, local_batch_size: int, size: int, batches: int, filler_rows: int) -> None:
    step = divided(degree, f"training.local_batch_size={local_batch_size}")
    assert (step.size, step.per_batch, step.batches) == (size, 1, batches)
    assert step.filler_share == pytest.approx(filler_rows / (16 + filler_rows))


@EACH_SCHEDULE
@pytest.mark.parametrize("schedule", get_args(PipelineSchedule))
@pytest.mark.parametrize("sync", ["every", "hybrid"])
def test_a_pipeline_gets_as_many_microbatches_as_its_schedule_needs(schedule: str, sync: str) -> None:
    chosen = f"parallelism.pp_schedule={schedule}", f"parallelism.gradient_sync={sync}", "model.n_layers=6"
    for degree in (1, 2, 3):
        for size in (1, 2, 3):
            config = small_config(
                degree * 2,
                *(SIXTEEN, *chosen, "training.local_batch_size=5", f"parallelism.pp_microbatch_size={size}"),
                *("parallelism.pp=2", f"parallelism.dp_shard={degree}"),
            )
            step = job_of(config, 2 * degree).step
            assert fits_schedule(config.parallelism, step.per_batch)
            assert step.size <= size
            assert step.rows_per_batch * step.batches >= step.sequences
            assert step.rows_per_batch * (step.batches - 1) < step.sequences, "a batch of filler alone"
    even = divided(2, *chosen, "training.local_batch_size=4", pp=2)
    assert (even.size, even.microbatches, even.filler_share) == (1, 8, 0)
