"""QK-clip on one process: which heads it scales, and what it leaves alone. On meshes: test_optimizer_layouts.py."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.models.layers import Attention
from titanlite.optim.optimizer import OptimizerConfig
from titanlite.optim.qk_clip import QKClip, check_qk_clip

pytestmark = pytest.mark.usefixtures("group")

HEAD_DIM = 4
FACTORS = {2: [1.0, 0.25, 1.0, 0.5], 4: [1.0, 0.5, 1.0, 0.5**0.5]}
"""Number of heads of keys -> factors of the heads of queries, with a threshold of 2."""


def build(n_kv_heads: int, largest: list[float]) -> tuple[Attention, QKClip]:
    attention = Attention(8, 4, n_kv_heads, HEAD_DIM, bias=True)
    for parameter in attention.parameters():
        nn.init.ones_(parameter)
    attention.largest = torch.tensor(largest)
    group = dist.group.WORLD
    assert group is not None
    return attention, QKClip([attention], 2.0, group, (0, 1))


def of_heads(parameter: Tensor) -> list[float]:
    return [head.unique().item() for head in parameter.detach().unflatten(0, (-1, HEAD_DIM))]


@pytest.mark.parametrize("n_kv_heads", FACTORS)
def test_heads_above_the_threshold_are_scaled(n_kv_heads: int) -> None:
    attention, clip = build(n_kv_heads, [2.0, 8.0, -torch.inf, 4.0])
    assert clip.clip_if(torch.tensor(True), counts=True).item() == 8.0
    for parameter in attention.wq.parameters():
        assert of_heads(parameter) == pytest.approx(FACTORS[n_kv_heads])
    for parameter in attention.wk.parameters():
        assert of_heads(parameter) == pytest.approx(FACTORS[4] if n_kv_heads == 4 else [1.0, 1.0])
    assert all((parameter == 1).all() for each in (attention.wv, attention.wo) for parameter in each.parameters())


def test_skipped_steps_and_filler_change_nothing() -> None:
    for ok, counts, largest in ((False, True, 8.0), (True, False, 8.0), (True, True, torch.nan)):
        attention, clip = build(2, [largest] * 4)
        clip.clip_if(torch.tensor(ok), counts=counts)
        assert all((parameter == 1).all() for parameter in attention.parameters())


def test_scores_are_noted_in_train_mode_only() -> None:
    model = Attention(8, 4, 2, HEAD_DIM, rotates=False)
    model.note_largest(4)
    model.largest = torch.full((4,), -torch.inf)
    x = torch.randn(2, 5, 8)
    model.eval()(x, None, None)
    assert not model.largest.isfinite().any()
    model.train()(x, None, None)
    assert model.largest.isfinite().all()


def test_own_attention_is_refused() -> None:
    section = OptimizerConfig(qk_clip=100.0)
    own = Attention(8, 4, 2, HEAD_DIM)
    own.attend = lambda queries, *_, **__: queries
    for model in (own, nn.Linear(2, 2)):
        (problem,) = check_qk_clip(section, model)
        assert "whose attention is its own" in problem.rule
    assert check_qk_clip(section, Attention(8, 4, 2, HEAD_DIM)) == []
