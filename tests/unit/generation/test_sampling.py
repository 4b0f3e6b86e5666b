import pytest
import torch
from torch import Tensor

from titanlite.generation import generate as sampling_module
from titanlite.generation.generate import Sampling, choose, probabilities


def logits(rows: int, vocab_size: int = 200) -> Tensor:
    return 3 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    scores = torch.tensor([[0.0, 2.0, 2.0], [5.0, -1.0, 4.0]])
    assert choose(scores, Sampling(0.0), 0).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-9, 1), (0.499, 1), (0.501, 2), (0.749, 2), (0.751, 3), (0.874, 3), (0.9, 4), (0.938, 5), (1.0, 5)],
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: int) -> None:
    """The last two are equal: if one of them is enough, the first stays."""
    exact = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]], dtype=torch.float64)
    found = probabilities(exact.log(), Sampling(1.0, top_p=top_p))[0]
    assert (found > 0).tolist() == [True] * kept + [False] * (5 - kept)
    assert float(found.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_p_reaches_a_sum_exactly(dtype: torch.dtype) -> None:
    found = probabilities(torch.zeros(1, 4, dtype=dtype), Sampling(1.0, top_p=0.75))
    assert (found[0] > 0).tolist() == [True, True, True, False]


def test_top_k_keeps_ties_with_the_last_token() -> None:
    found = probabilities(torch.tensor([[1.0, 3.0, 1.0, 0.0, 1.0]]), Sampling(1.0, top_k=2))
    assert (found > 0).tolist() == [[True, True, True, False, True]]


def test_top_p_applies_after_top_k() -> None:
    exact = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    found = probabilities(exact.log(), Sampling(1.0, top_k=2, top_p=0.55))  # 4/7 is enough
    assert found.tolist() == [[1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-12, 1e30])
def test_no_temperature_overflows(temperature: float) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        scores = torch.tensor([[3.0, 1e4, -1e4, 1e4]], dtype=dtype)
        found = probabilities(scores, Sampling(temperature))
        expected = [0.0, 0.5, 0.0, 0.5] if temperature < 1 else [0.25] * 4
        assert found[0].tolist() == pytest.approx(expected)


def test_probabilities_are_never_less_precise_than_float32() -> None:
    assert probabilities(logits(1).bfloat16(), Sampling(1.0)).dtype == torch.float32
    assert probabilities(logits(1), Sampling(1.0)).dtype == torch.float64


@pytest.mark.parametrize("sampling", [Sampling(1.0, seed=3), Sampling(2.5, 20, 0.8, seed=4)])
def test_tokens_are_drawn_as_often_as_they_are_likely(sampling: Sampling) -> None:
    """Chi-square over 40,000 draws: 500 rows at each of 80 steps."""
    scores = logits(1, 50)
    expected = probabilities(scores, sampling)[0]
    draws = torch.cat([choose(scores.expand(500, -1), sampling, step) for step in range(80)])
    counts = draws.bincount(minlength=50).double()
    likely = expected > 1e-3  # all others share one cell
    observed = torch.cat((counts[likely], counts[~likely].sum(0, keepdim=True)))
    wanted = torch.cat((expected[likely], expected[~likely].sum(0, keepdim=True))) * len(draws)
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi_square = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    assert freedom >= 8
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5
    assert int(counts[expected == 0].sum()) == 0


def test_draws_depend_only_on_seed_row_and_step() -> None:
    scores = logits(1).expand(64, -1)
    first = choose(scores, Sampling(1.0, seed=5), 7)
    assert torch.equal(first, choose(scores, Sampling(1.0, seed=5), 7))
    assert torch.equal(first[:3], choose(scores[:3], Sampling(1.0, seed=5), 7))
    for other in (choose(scores, Sampling(1.0, seed=6), 7), choose(scores, Sampling(1.0, seed=5), 8)):
        assert int((first == other).sum()) < 32
    assert len(first.unique()) > 10


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-24])
def test_the_smallest_and_largest_random_numbers_draw_valid_tokens(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probabilities in float32 add up to slightly more or less than 1; the first and last tokens have probability 0."""
    scores = 3 * torch.randn(300, 1000, generator=torch.Generator().manual_seed(1))
    scores[:, :2] = scores[:, -2:] = -torch.inf
    sums = probabilities(scores, Sampling(1.0)).double().sum(-1)
    assert sums.min() < 1 - 1e-9 < 1 + 1e-9 < sums.max()
    drawn = torch.full((300, 2), number, dtype=torch.float64)
    monkeypatch.setattr(sampling_module, "uniform", lambda *_, **__: drawn)
    assert choose(scores, Sampling(1.0), 0).unique().tolist() == [997 if number else 2]
