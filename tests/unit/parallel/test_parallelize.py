"""What parallelize applies to the output layer, and what is chosen by device and size."""

from typing import Any, cast

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.distributed.layouts import EXPERTS
from tests.distributed.reference import small_config
from tests.simulated import simulated_mesh
from titanlite.assembly.model import build_parts
from titanlite.models.family import resolve_model
from titanlite.models.head import OutputLayer
from titanlite.models.llama3 import Llama3, Llama3Config, structure
from titanlite.parallel.compile import CompileConfig, apply_compile
from titanlite.parallel.data import AT_ONCE_BYTES, replicates_at_once


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["loss.chunk_tokens=7"], (7, False, True)),
        (["loss.chunk_tokens=7", "parallelism.tp=2"], (7, False, False)),
        (["parallelism.pp=2"], ("auto", True, True)),
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


def test_the_loss_is_compiled_if_configured() -> None:
    config = Llama3Config(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=80, vocab_size=50, max_seq_len=32)
    model, counter = Llama3(config), CompileCounter()
    section = CompileConfig(enable=True, backend=cast("Any", counter))
    lines = apply_compile(model, structure(config), section)
    assert [line.partition(" to ")[2] for line in lines] == ["the loss", "each block"]
    (head,) = (module for module in model.modules() if isinstance(module, OutputLayer))
    head(torch.randn(1, 4, 32), torch.zeros(1, 4, dtype=torch.int64), torch.tensor([4]))
    assert counter.frame_count == 1


def test_blocks_with_experts_are_not_compiled() -> None:
    family, config = resolve_model(small_config(1, *EXPERTS).model)
    model = family.build(config)
    before = [block.forward for block in model.layers.values()]
    lines = apply_compile(model, family.structure(config), CompileConfig(enable=True, backend="eager"))
    assert lines[-1].endswith("to 0 of 2 blocks: those without experts")
    assert [block.forward for block in model.layers.values()] == before


def test_only_small_models_on_a_cpu_are_reduced_at_once() -> None:
    assert replicates_at_once("cpu", AT_ONCE_BYTES)
    assert not replicates_at_once("cpu", AT_ONCE_BYTES + 1)
    assert not replicates_at_once("cuda", 1)
