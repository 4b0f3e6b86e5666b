"""The text of tokens that come one by one."""

from collections.abc import Sequence

from titanlite.data.tokenizer import Tokenizer

_UNDECODED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Text in pieces, none of which is taken back: a character whose bytes are not all there yet is waited for.

    All pieces together are what `tokenizer.decode` makes of the prompt and all tokens, after what it makes of the
    prompt. Only the tokens since the piece before the last one are decoded again, so the cost does not grow.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._byte_tokens = tokenizer.byte_tokens()
        self._ids = list(prompt)
        self._num_given = len(prompt)
        self._given = tokenizer.decode(prompt)

    def add(self, token: int) -> str:
        """What is certain by now; "" where it is nothing new, as after an id that is no token."""
        if not self._tokenizer.has(token):
            return ""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if token in self._byte_tokens or text.endswith(_UNDECODED):
            return ""
        return self._give(text)

    def rest(self) -> str:
        """What was waited for, as it is: no token follows."""
        return self._give(self._tokenizer.decode(self._ids))

    def _give(self, text: str) -> str:
        """The new end of `text`. Tokens given now remain, since some decoders treat the first of all differently."""
        new = text[len(self._given) :]
        self._ids = self._ids[self._num_given :]
        self._num_given = len(self._ids)
        self._given = self._tokenizer.decode(self._ids)
        return new
