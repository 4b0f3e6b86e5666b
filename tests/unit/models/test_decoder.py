"""Rotary embeddings and documents of the decoder; tests/unit/models/test_transformers.py has its logits."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.unit.models.shaken import perturbed_model
from titanlite.models.attention import may_see
from titanlite.models.init import init_parameters_
from titanlite.models.layers import Llama3Scaling, RotaryEmbedding, RotaryTables
from titanlite.models.llama3 import LLAMA3, Llama3, Llama3Config

CONFIG = Llama3Config(
    dim=24,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=40,
    vocab_size=50,
    norm_eps=1e-2,
    rope_theta=1000.0,
    rope_scaling_factor=8.0,
    rope_low_freq_factor=1.5,
    rope_high_freq_factor=3.0,
    rope_original_seq_len=16,
    max_seq_len=64,
)
CPU = torch.device("cpu")


def _tokens(batch: int, seq_len: int) -> Tensor:
    return torch.randint(CONFIG.vocab_size, (batch, seq_len), generator=torch.Generator().manual_seed(5))


def test_a_query_sees_the_keys_of_its_document_up_to_itself() -> None:
    document_ids = torch.tensor([[0] * 5 + [1] * 7, [4] * 1 + [2] * 6 + [4] * 5])
    expected = [
        [[key <= query and ids[key] == ids[query] for key in range(12)] for query in range(12)]
        for ids in document_ids.tolist()
    ]
    assert may_see(document_ids).squeeze(1).tolist() == expected


def test_positions_choose_the_angles() -> None:
    """Those of later positions after a gap; equal distances give equal logits."""
    model, tokens = perturbed_model(LLAMA3, CONFIG), _tokens(2, 12)
    positions = torch.arange(12).expand(2, 12)
    torch.testing.assert_close(model(tokens, positions + 7), model(tokens), rtol=1e-11, atol=1e-11)
    gap = positions + 20 * (positions >= 6)
    x = torch.randn(2, 40, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rotated = model.rope(None).rotate(x)
    torch.testing.assert_close(model.rope(gap).rotate(x[:, gap[0]]), rotated[:, gap[0]], rtol=0, atol=0)
    assert not torch.isclose(model(tokens, gap)[:, 6:], model(tokens)[:, 6:]).all(-1).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rotary_tables_are_in_float32_or_better(dtype: torch.dtype) -> None:
    model = Llama3(CONFIG).to(dtype)
    model.init_buffers(CPU)
    assert model.rope.cos.dtype == torch.promote_types(dtype, torch.float32)


def test_rotation_in_bfloat16_rounds_once() -> None:
    """Computed in float32: equal to the exact result rounded to bfloat16, except for rounding ties."""
    rope = RotaryEmbedding(16, 4096, 500_000.0, Llama3Scaling(1.0, 1.0, 4.0, 8192))
    rope.init_buffers(CPU, torch.float64)
    x = torch.randn(1, 4096, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = rope(None).rotate(x.double()).bfloat16()
    rope.init_buffers(CPU, torch.float32)
    rotated = rope(None).rotate(x)
    assert rotated.dtype == torch.bfloat16
    assert (rotated != exact).double().mean().item() < 1e-3


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_mixed_precision_does_not_cast_the_rotary_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """fully_shard casts a block's floating-point arguments to the compute dtype; the tables must not be among them."""
    model = Llama3(CONFIG)
    model.init_buffers(CPU)
    init_parameters_(model, 1, partial(LLAMA3.init, CONFIG))
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    seen: list[tuple[torch.dtype, ...]] = []
    rotate = RotaryTables.rotate

    def spy(tables: RotaryTables, x: Tensor) -> Tensor:
        seen.append((x.dtype, tables.cos.dtype, tables.sin.dtype))
        return rotate(tables, x)

    monkeypatch.setattr(RotaryTables, "rotate", spy)
    positions = torch.arange(8).expand(2, 8)
    assert model(_tokens(2, 8), positions).dtype == torch.bfloat16
    assert set(seen) == {(torch.bfloat16, torch.float32, torch.float32)}
