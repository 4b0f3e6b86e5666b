"""Decode tokens to text one at a time."""

from collections.abc import Sequence

from titanlite.data.tokenizer import Tokenizer

_UNDECODED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns tokens into text that is printed at once and never changed: `add` returns "" while a character lacks bytes.

    The returned texts, joined, equal `tokenizer.decode` of the prompt and all tokens, minus the decoded prompt. Each
    call decodes only the tokens of the last two texts, so its cost does not grow.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._byte_tokens = tokenizer.byte_tokens()
        self._ids = list(prompt)
        self._num_emitted = len(prompt)
        self._emitted = tokenizer.decode(prompt)

    def add(self, token: int) -> str:
        """The text that this token completes; "" if it completes nothing or the tokenizer lacks the id."""
        if not self._tokenizer.has(token):
            return ""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if token in self._byte_tokens or text.endswith(_UNDECODED):
            return ""
        return self._emit(text)

    def rest(self) -> str:
        """The text held back so far, even if incomplete. Call after the last token."""
        return self._emit(self._tokenizer.decode(self._ids))

    def _emit(self, text: str) -> str:
        """The new end of `text`. Keeps its tokens as context, since some decoders treat the first token differently."""
        new = text[len(self._emitted) :]
        self._ids = self._ids[self._num_emitted :]
        self._num_emitted = len(self._ids)
        self._emitted = self._tokenizer.decode(self._ids)
        return new
