import random

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from titanlite.data.bpe import train_bpe
from titanlite.data.tokenizer import Tokenizer
from titanlite.generation import generate as sampling_module
from titanlite.generation.generate import Sampling, TextStream, choose, probabilities

TEXT = "naïve 日本語 😀😀 the model\n\twrites “this” and\u200b that � é"


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("byte_level")
    train_bpe(iter([TEXT] * 2), 300, folder)
    return Tokenizer(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Like SentencePiece: words begin with a space, which the first word of a text loses; each byte is a token."""
    words = ["▁the", "▁model", "wri", "tes", "▁", "é", "\n"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + n for n, word in enumerate(words)}
    raw = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    raw.add_special_tokens(["<s>"])
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(steps)
    file = tmp_path_factory.mktemp("byte_fallback") / "tokenizer.json"
    raw.save(str(file))
    return Tokenizer(file)


@pytest.fixture(params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def pieces(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> list[str]:
    stream = TextStream(tokenizer, prompt)
    return [*(stream.add(token) for token in tokens), stream.rest()]


def test_pieces_add_up_to_the_text_of_all_tokens(tokenizer: Tokenizer) -> None:
    """Random tokens, mostly invalid UTF-8, including ids that the tokenizer does not have."""
    rng = random.Random(0)
    size = tokenizer.vocab_size
    few = [0xE2, 0x82, 0xAC, size - 1, size - 2, size + 5, *rng.sample(range(size), 3)]
    for case in range(400):
        alphabet = few if case % 2 else range(size)
        prompt, tokens = (rng.choices(alphabet, k=rng.randrange(limit)) for limit in (4, 24))
        expected = tokenizer.decode(prompt + tokens)[len(tokenizer.decode(prompt)) :]
        assert "".join(pieces(tokenizer, prompt, tokens)) == expected, (prompt, tokens)


def test_half_a_character_is_never_shown(byte_level: Tokenizer) -> None:
    text = "汉字🦊ß"
    tokens = byte_level.encode(text)
    assert len(tokens) > 2 * len(text)
    found = pieces(byte_level, byte_level.encode("x"), tokens)
    assert [piece for piece in found if piece] == list(text)


def test_byte_tokens_are_held_back_until_the_next_other_token(byte_fallback: Tokenizer) -> None:
    the, euro = 256, [0xE2, 0x82, 0xAC]
    assert pieces(byte_fallback, [the], [*euro, the]) == ["", "", "", "€ the", ""]
    assert pieces(byte_fallback, [the], euro) == ["", "", "", "€"]
    assert pieces(byte_fallback, [the], [*euro, 0xFF, the]) == ["", "", "", "", "���� the", ""]


def test_words_keep_the_space_before_them(byte_fallback: Tokenizer) -> None:
    assert pieces(byte_fallback, [256], [257, 256, 258, 259, 257]) == [" model", " the", "wri", "tes", " model", ""]


def test_plain_text_appears_with_each_token_and_is_not_decoded_again(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = byte_level.encode("the model writes this " * 50)
    decoded: list[int] = []
    decode = byte_level.decode
    monkeypatch.setattr(byte_level, "decode", lambda ids: (decoded.append(len(ids)), decode(ids))[1])
    stream = TextStream(byte_level, tokens)
    assert all(stream.add(token) for token in tokens)
    assert sum(decoded) < 8 * len(tokens)


def test_incomplete_bytes_appear_at_the_end(byte_level: Tokenizer) -> None:
    first, *_ = byte_level.encode("🦊")
    assert pieces(byte_level, [], [first]) == ["", "�"]


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
