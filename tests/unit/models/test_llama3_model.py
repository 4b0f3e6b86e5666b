"""Llama 3 against a second implementation, written below in plain einsum without the model's code."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
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


def _reference_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (torch.einsum("btd,btd->bt", x, x)[..., None] / x.shape[-1] + eps).sqrt() * weight


def _reference_frequencies(config: Llama3Config) -> list[float]:
    """Rotary frequencies of Llama 3.1, whose rule depends on the wavelength."""
    frequencies = []
    for index in range(config.head_dim // 2):
        frequency = config.rope_theta ** (-2 * index / config.head_dim)
        wavelength = 2 * math.pi / frequency
        low = config.rope_original_seq_len / config.rope_low_freq_factor
        high = config.rope_original_seq_len / config.rope_high_freq_factor
        if wavelength > low:
            frequency /= config.rope_scaling_factor
        elif wavelength >= high:
            smooth = (config.rope_original_seq_len / wavelength - config.rope_low_freq_factor) / (
                config.rope_high_freq_factor - config.rope_low_freq_factor
            )
            frequency = (1 - smooth) * frequency / config.rope_scaling_factor + smooth * frequency
        frequencies.append(frequency)
    return frequencies


def _reference_rotation(config: Llama3Config, positions: Tensor) -> Tensor:
    """(batch, seq_len, head_dim, head_dim) matrices that rotate each pair (i, i + head_dim / 2)."""
    half = config.head_dim // 2
    matrices = torch.zeros(*positions.shape, 2 * half, 2 * half, dtype=torch.float64)
    for index, frequency in enumerate(_reference_frequencies(config)):
        angle = positions.double() * frequency
        matrices[..., index, index] = matrices[..., index + half, index + half] = angle.cos()
        matrices[..., index + half, index] = angle.sin()
        matrices[..., index, index + half] = -angle.sin()
    return matrices


def _reference(model: Llama3, tokens: Tensor, positions: Tensor, may_see: Tensor) -> Tensor:
    """may_see: bool (batch, seq_len, seq_len)."""
    config, w = model.config, dict(model.named_parameters(remove_duplicate=False))
    rotation = _reference_rotation(config, positions)
    heads = (config.n_heads, config.n_kv_heads, config.head_dim)
    x = w["tok_embeddings.weight"][tokens]
    for index in range(config.n_layers):
        layer = f"layers.{index}."
        h = _reference_norm(x, w[layer + "attention_norm.weight"], config.norm_eps)
        x = x + _reference_attention(h, w, layer + "attention.", heads, rotation, may_see)
        h = _reference_norm(x, w[layer + "ffn_norm.weight"], config.norm_eps)
        gate = torch.einsum("btd,hd->bth", h, w[layer + "feed_forward.w1.weight"])
        up = torch.einsum("btd,hd->bth", h, w[layer + "feed_forward.w3.weight"])
        x = x + torch.einsum("bth,dh->btd", gate / (1 + (-gate).exp()) * up, w[layer + "feed_forward.w2.weight"])
    x = _reference_norm(x, w["norm.weight"], config.norm_eps)
    return torch.einsum("btd,vd->btv", x, w["output.weight"])


def _reference_attention(
    h: Tensor, w: dict[str, nn.Parameter], prefix: str, heads: tuple[int, int, int], rotation: Tensor, may_see: Tensor
) -> Tensor:
    n_heads, n_kv_heads, head_dim = heads
    out = torch.zeros_like(h)
    for head in range(n_heads):
        shared = head // (n_heads // n_kv_heads)
        rows, kv_rows = (slice(n * head_dim, (n + 1) * head_dim) for n in (head, shared))
        query = torch.einsum("btd,kd,btjk->btj", h, w[prefix + "wq.weight"][rows], rotation)
        key = torch.einsum("btd,kd,btjk->btj", h, w[prefix + "wk.weight"][kv_rows], rotation)
        value = torch.einsum("btd,kd->btk", h, w[prefix + "wv.weight"][kv_rows])
        scores = torch.einsum("bqk,bsk->bqs", query, key) / math.sqrt(head_dim)
        weights = torch.where(may_see, scores.exp(), 0.0)
        weights = weights / weights.sum(-1, keepdim=True)
        out = out + torch.einsum("bqs,bsk,dk->bqd", weights, value, w[prefix + "wo.weight"][:, rows])
    return out


def _causal(batch: int, seq_len: int) -> Tensor:
    return torch.ones(batch, seq_len, seq_len, dtype=torch.bool).tril()


def _gradients(model: Llama3, logits: Tensor) -> list[Tensor]:
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return list(torch.autograd.grad((logits * weights).sum(), list(model.parameters())))


def _assert_equal(left: Tensor, right: Tensor, rtol: float = 1e-12) -> None:
    assert left.dtype == right.dtype == torch.float64
    assert ((left - right).norm() / right.norm()).item() <= rtol


VARIANTS = [
    CONFIG,
    replace(CONFIG, n_kv_heads=4),
    replace(CONFIG, n_kv_heads=1),
    replace(CONFIG, rope_scaling_factor=1.0),
    replace(CONFIG, tie_embeddings=True),
]


@pytest.mark.parametrize("config", VARIANTS, ids=["gqa", "mha", "mqa", "unscaled", "tied"])
def test_logits_and_gradients_match_the_reference(config: Llama3Config) -> None:
    """In float64, to 1e-12: a single operation in float32 would cause an error of 1e-7."""
    model, tokens = perturbed_model(LLAMA3, config), _tokens(2, 33)
    expected = _reference(model, tokens, torch.arange(33).expand(2, 33), _causal(2, 33))
    logits = model(tokens)
    _assert_equal(logits, expected)
    for gradient, expected_gradient in zip(_gradients(model, logits), _gradients(model, expected), strict=True):
        _assert_equal(gradient, expected_gradient)


def test_positions_and_documents_against_the_reference() -> None:
    model, tokens = perturbed_model(LLAMA3, CONFIG), _tokens(2, 12)
    positions = torch.randint(CONFIG.max_seq_len, (2, 12), generator=torch.Generator().manual_seed(3))
    document_ids = torch.tensor([[0] * 5 + [1] * 7, [4] * 1 + [2] * 6 + [4] * 5])
    visible = _causal(2, 12)
    for batch in range(2):
        for query in range(12):
            for key in range(12):
                visible[batch, query, key] &= bool(document_ids[batch, query] == document_ids[batch, key])
    assert torch.equal(may_see(document_ids), visible.unsqueeze(1))
    logits = model(tokens, positions, document_ids)
    _assert_equal(logits, _reference(model, tokens, positions, visible))


def test_by_default_a_row_is_one_document_from_position_0() -> None:
    model, tokens = perturbed_model(LLAMA3, CONFIG), _tokens(2, 9)
    positions = torch.arange(9).expand(2, 9)
    _assert_equal(model(tokens, positions, torch.zeros_like(tokens)), model(tokens))


def test_no_position_sees_a_later_token() -> None:
    model, tokens = perturbed_model(LLAMA3, CONFIG), _tokens(1, 10)
    changed = tokens.clone()
    changed[0, 6:] = (changed[0, 6:] + 1) % CONFIG.vocab_size
    before, after = model(tokens), model(changed)
    _assert_equal(after[:, :6], before[:, :6], 1e-14)
    assert not torch.isclose(before[:, 6:], after[:, 6:]).all(-1).any()


def test_tied_gradient_is_the_sum_of_both_uses() -> None:
    tied = perturbed_model(LLAMA3, replace(CONFIG, tie_embeddings=True))
    untied = perturbed_model(LLAMA3, CONFIG)
    untied.load_state_dict(tied.state_dict())
    tokens = _tokens(2, 9)
    for model in (tied, untied):
        model(tokens).square().sum().backward()
    embedding, output = untied.tok_embeddings.weight.grad, untied.output.weight.grad
    assert embedding is not None
    assert output is not None
    assert tied.tok_embeddings.weight.grad is not None
    _assert_equal(tied.tok_embeddings.weight.grad, embedding + output)


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


def test_rotary_frequencies_of_llama_3_1() -> None:
    """With the hyper-parameters of 8B, each branch of the rule: unchanged, interpolated, scaled."""
    config = Llama3Config(4096, 32, 32, 8, 14_336, 128_256, rope_scaling_factor=8.0)
    plain = 500_000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    scaled = Llama3Scaling(8.0, 1.0, 4.0, 8192).apply(plain)
    torch.testing.assert_close(scaled.tolist(), _reference_frequencies(config), rtol=1e-14, atol=0.0)
    ratios = plain / scaled
    assert (ratios[:28] - 1).abs().max() < 1e-14  # wavelengths up to 2,048
    assert ((ratios[29:35] > 1) & (ratios[29:35] < 8)).all()
    assert (ratios[36:] - 8).abs().max() < 1e-13  # wavelengths above 8,192
    assert torch.equal(Llama3Scaling(1.0, 1.0, 4.0, 8192).apply(plain), plain)


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
