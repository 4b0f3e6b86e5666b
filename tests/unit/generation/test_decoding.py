import random

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from titanlite.data.bpe import train_bpe
from titanlite.data.tokenizer import Tokenizer
from titanlite.generation.generate import TextStream

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
