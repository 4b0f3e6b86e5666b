"""Decode tokens to text one at a time."""

from collections.abc import Sequence

from titanlite.data.tokenizer import Tokenizer

_UNDECODED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Emits text in pieces and never retracts one: an incomplete character is held back until its last byte arrives.

    The concatenated pieces equal `tokenizer.decode` of the prompt and all tokens, minus the decoded prompt. Each step
    decodes only the tokens since the piece before the last one, so its cost does not grow.
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
