"""Special tokens of rendered conversations: those that stand alone as words, parts of roles, and unknown characters."""

from collections.abc import Sequence

import pytest
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from titanlite.data.chat.special_tokens import Encoded, SpecialTokens
from titanlite.runtime.errors import UserError

WORDS = ["<unk>", "the", "tools", "user", ":", "<", ">", "unk", "tool", "user:"]


@pytest.fixture
def special_tokens() -> SpecialTokens:
    """Of a vocabulary of words. Special: "<unk>", "user:", and "tool" where no letter is beside it."""
    library = Library(models.WordLevel({word: token for token, word in enumerate(WORDS)}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["<unk>", "user:", AddedToken("tool", single_word=True)])
    return SpecialTokens(library.to_str().encode())


def words(special_tokens: SpecialTokens, text: str, marked: bool = False) -> Sequence[str]:
    """The tokens of a text, in which a special token is between [ and ]."""
    (found,) = special_tokens.encode([special_tokens.written(text) if marked else text], marked)
    assert isinstance(found, Encoded), found
    names = [WORDS[token] for token in found.ids]
    return [f"[{name}]" if special else name for name, special in zip(names, found.is_special, strict=True)]


def test_a_special_token_that_is_a_word_is_not_found_in_longer_words(special_tokens: SpecialTokens) -> None:
    assert words(special_tokens, "tools tool the") == ["tools", "[tool]", "the"]
    messages, _, has_text = special_tokens.mark([{"role": "user", "content": "tools"}])
    assert (messages[0]["content"], has_text) == ("tools", False)
    messages, _, has_text = special_tokens.mark([{"role": "user", "content": "the tool"}])
    assert has_text
    found = words(special_tokens, f"tools tool {messages[0]['content']}", True)
    assert found == ["tools", "[tool]", "the", "<unk>"]  # the vocabulary has the special token only


def test_long_special_tokens_are_refused() -> None:
    """Of 100,000 characters, all beginnings take 5 GB."""
    library = Library(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    library.add_special_tokens(["x" * 100_000])
    with pytest.raises(UserError, match=r"too long for conversations: the longest one, 'x+'…, has 100,000 characters"):
        SpecialTokens(library.to_str().encode())


def test_a_role_is_a_part_of_the_special_tokens_of_the_template(special_tokens: SpecialTokens) -> None:
    """Also in a message that has the text of a special token."""
    assert not special_tokens.mark([{"role": "user", "content": "the"}])[2]
    (message,), _, has_text = special_tokens.mark([{"role": "user", "content": "user: the"}])
    assert has_text
    text = f"{message['role']}: {message['content']}"
    assert words(special_tokens, text, True) == ["[user:]", "user", ":", "the"]


@pytest.mark.parametrize("content", ["日本 the", "日本 the <unk>"])
def test_unknown_characters_are_no_special_token_of_a_message(special_tokens: SpecialTokens, content: str) -> None:
    """Their token is the one of "<unk>", whose text in a message stays text, too."""
    (message,), _, has_text = special_tokens.mark([{"role": "user", "content": content}])
    assert has_text == ("<unk>" in content)
    expected = ["[user:]", "<unk>", "the", *(["<", "unk", ">"] if has_text else [])]
    assert words(special_tokens, f"user: {message['content']}", has_text) == expected
