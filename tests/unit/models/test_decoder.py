"""Rotary embeddings and documents of the decoder; tests/unit/models/test_transformers.py has its logits."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.unit.hf.making import tiny
from tests.unit.models.shaken import perturbed_model
from titanlite.batch import IGNORE_INDEX, Batch
from titanlite.forward import further_labels, next_tokens
from titanlite.models.attention import document_arguments, may_see
from titanlite.models.decoder import Block, Decoder, FurtherBlock
from titanlite.models.deepseek_v3 import DEEPSEEK_V3
from titanlite.models.head import LossComputation, OutputLayer
from titanlite.models.init import init_parameters_
from titanlite.models.layers import Llama3Scaling, RotaryEmbedding, RotaryTables
from titanlite.models.llama3 import LLAMA3, Llama3, Llama3Config
from titanlite.models.registry import structure_of

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


@pytest.mark.usefixtures("group")
def test_mixed_precision_does_not_cast_the_rotary_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """fully_shard casts a block's floating-point arguments to the compute dtype; the tables must not be among them."""
    model = Llama3(CONFIG)
    model.init_buffers(CPU)
    init_parameters_(model, 1, structure_of(LLAMA3, CONFIG, model).init)
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


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize(("chunk", "recomputes"), [(64, False), (5, False), (5, True)])
def test_further_tokens_of_uneven_documents(chunk: int, recomputes: bool) -> None:
    """Loss, term and gradients of the formulas, label by label."""
    config = tiny(DEEPSEEK_V3, n_further_tokens=1, vocab_size=50, norm_eps=1e-2, balance_loss=0.0)
    model, tokens, none = perturbed_model(DEEPSEEK_V3, config), _tokens(3, 12), torch.zeros(3, dtype=torch.int64)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ([12], [3, 1, 6, 2], [5, 7])])
    labels = torch.cat((tokens[:, 1:], tokens[:, :1]), dim=1)
    labels[:, :-1][positions[:, 1:] == 0] = IGNORE_INDEX
    labels[0, 4] = labels[2, -1] = IGNORE_INDEX
    batch, documents = Batch(tokens, labels, none, none, positions), document_arguments(positions)
    assert isinstance(model, Decoder)
    assert isinstance(model.output, OutputLayer)
    output, block = model.output, model.further_block
    assert isinstance(block, FurtherBlock)

    inputs: list[Tensor] = []
    with output.register_forward_pre_hook(lambda _module, args: inputs.append(args[0])):
        model(tokens, **documents)
    following = torch.cat((tokens[:, 1:], tokens[:, :1]), dim=1)
    embeddings = _normed(model.get_parameter("tok_embeddings.weight")[following], block.embedding_norm.weight, 1e-2)
    hidden = _normed(inputs[0], block.hidden_norm.weight, 1e-2)
    joined = torch.cat((embeddings, hidden), dim=-1) @ block.projection.weight.T
    mask = model.masks(documents["document_ids"], joined.dtype)
    found = Block.forward(block, joined, model.rope(positions), mask, None)
    further = _normed(found, block.output_norm.weight, 1e-2)

    def mean_of(x: Tensor, wanted: list[tuple[int, int, int]]) -> Tensor:
        logs = (x @ output.weight.T).log_softmax(-1)
        return -torch.stack([logs[row, place, label] for row, place, label in wanted]).mean()

    ends = {(row, place) for row in range(3) for place in range(12) if place == 11 or positions[row, place + 1] == 0}
    own = [(row, place, int(labels[row, place])) for row in range(3) for place in range(12) if labels[row, place] >= 0]
    later = [(row, place - 1, label) for row, place, label in own if place and (row, place - 1) not in ends]
    assert len(later) == 10 + 6 + 8
    mean, term = mean_of(inputs[0], own), 0.3 * mean_of(further, later)
    parameters = dict(model.named_parameters())
    expected = torch.autograd.grad(mean + term, list(parameters.values()), allow_unused=True)

    output.computation = LossComputation(chunk_tokens=chunk, recomputes=recomputes, further_weight=0.3)
    output.start_step(output.computation.counts(labels, further_labels(batch)))
    more = {"next_tokens": next_tokens(batch), "further_labels": further_labels(batch)}
    losses = model(tokens, **documents, labels=labels, num_valid=torch.tensor([len(own)] * 3), **more)
    torch.testing.assert_close(losses.sum(), mean, rtol=1e-12, atol=0)
    assert output.term_sums is not None
    torch.testing.assert_close(output.term_sums.sum(), term.detach(), rtol=1e-12, atol=0)
    gradients = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
    for name, gradient, right in zip(parameters, gradients, expected, strict=True):
        assert gradient is not None, name
        assert right is not None, name
        torch.testing.assert_close(gradient, right, rtol=1e-12, atol=1e-14, msg=name)
