"""Special tokens of a rendered conversation: those that the template has written are tokens, others are text."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tokenizers

from titanlite.data.chat.messages import TOOLS, VALUES, Message
from titanlite.data.chat.template import IN_CONTENT, MARKS, NO_VALUES, OF_TEMPLATE
from titanlite.data.sources.pieces import BadRowError
from titanlite.runtime.errors import UserError, is_error
from titanlite.runtime.text import is_visible

MAX_PARTS = 20_000_000
"""Limit of the sum of the squared lengths of all special tokens, whose beginnings and endings are kept. It is below two
million for published tokenizers."""


class Encoded(NamedTuple):
    """ids: int64 (n,). offsets: int64 (n, 2), begin and end of each token in characters. is_special: bool (n,).

    is_partial: whether a visible character of the text is in no token, since the tokenizer removes it.
    """

    ids: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    is_special: npt.NDArray[np.bool_]
    is_partial: bool


class SpecialTokens:
    """Encodes rendered conversations in which messages may have the text of special tokens.

    A conversation without such text is encoded as it is, with all special tokens, as in transformers. Otherwise `mark`
    marks the text in the messages, also a part of it at the begin or end of a value, which the text beside it may
    complete, and `written` the special tokens that the template writes. A copy of the tokenizer,
    whose special tokens have this mark in their names, encodes the result: for it, the text of a special token is like
    any other text, even if it is a word of the vocabulary.

    marks: id -> text of the added tokens, special or not, with which a template may end a turn: not line ends.
    """

    def __init__(self, content: bytes) -> None:
        """content: see Tokenizer.content."""
        self._content = content
        self._tokenizer = _open(content)
        unknown = json.loads(self._tokenizer.to_str())["model"].get("unk_token")
        tokens = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: (token_id, token) for token_id, token in tokens.items() if token.special}
        # The token of unknown characters does not show that its text was found.
        self._ids = {text: token_id for text, (token_id, _) in special.items() if text != unknown}
        self._id_array = np.array(list(self._ids.values()), np.int64)
        patterns = [
            rf"(?<!\w){re.escape(text)}(?!\w)" if special[text][1].single_word else re.escape(text)
            for text in sorted(special, key=len, reverse=True)  # the tokenizers library finds the longest, too
        ]
        if sum(len(text) ** 2 for text in special) > MAX_PARTS:
            longest = max(special, key=len)
            raise UserError(
                "the tokenizer's special tokens are too long for conversations: the longest one, "
                f"{longest[:40]!r}…, has {len(longest):,} characters"
            )
        self.marks = {key: token.content.strip() for key, token in tokens.items() if token.content.strip()}
        self._beginnings = {text[:size] for text in special for size in range(1, len(text))}
        self._endings = {text[size:] for text in special for size in range(1, len(text))}
        self._max_length = max(map(len, special), default=0)
        pattern = "|".join(patterns) or "(?!)"
        self._text = re.compile(pattern)
        self._text_or_invalid = re.compile(f"[{MARKS}\0\ud800-\udfff]|{pattern}")
        self._of_template = re.compile(f"(?<!{IN_CONTENT})({pattern})")
        self._of_template_marked = re.compile(f"(?<={OF_TEMPLATE})(?:{pattern})")

    def mark(
        self, messages: Sequence[Message], values: Mapping[str, Any] = NO_VALUES
    ) -> tuple[Sequence[Message], Mapping[str, Any], bool]:
        """The messages and the other values of a conversation, with IN_CONTENT before each character of the text of a
        special token, and whether there is any.

        A part of the text at an edge of a value counts, too, but not of the role: templates write <|ROLE|>. Raises
        BadRowError if one of them contains one of MARKS, a NUL, or an unpaired surrogate.
        """
        marked: list[Message] = []
        has_text = False
        for number, message in enumerate([*messages, values], 1):
            where = f"turn {number}" if number <= len(messages) else f"{TOOLS} or {VALUES}"
            found = {hit[0] for text in _texts(message) for hit in self._text_or_invalid.finditer(text)}
            if not found.isdisjoint(MARKS):
                raise BadRowError(f"{where}: it has one of the characters U+FDD2 to U+FDD5, which are reserved")
            if "\0" in found:
                raise BadRowError(f"{where}: it has a NUL character, which text does not have")
            if surrogates := sorted(hit for hit in found if "\ud800" <= hit <= "\udfff"):
                raise BadRowError(f"{where}: it has an unpaired surrogate, \\u{ord(surrogates[0]):04x}")
            without_role = {name: value for name, value in message.items() if name != "role"}
            is_marked = bool(found) or any(self._edges(text) for text in _texts(without_role, names=False))
            has_text = has_text or is_marked
            marked.append(self._with_marks(message) if is_marked else message)
        return marked[:-1], marked[-1], has_text

    def _with_marks(self, message: Message) -> Message:
        return {
            self._marked(name, edges=False): self._marked(value, edges=name != "role")
            for name, value in message.items()
        }

    def _marked(self, value: Any, *, edges: bool = True) -> Any:
        """A value of JSON with marks. edges: whether a part of a special token at an edge counts."""
        if isinstance(value, str):
            spans = [found.span() for found in self._text.finditer(value)] + (self._edges(value) if edges else [])
            places = {place for begin, end in spans for place in range(begin, end)}
            return "".join(IN_CONTENT + each if place in places else each for place, each in enumerate(value))
        if isinstance(value, Mapping):
            return {self._marked(name, edges=False): self._marked(item) for name, item in value.items()}
        return [self._marked(item) for item in value] if isinstance(value, list | tuple) else value

    def _edges(self, text: str) -> list[tuple[int, int]]:
        """(begin, end) of a part of a special token at the begin and at the end of a text, whose whitespace templates
        remove."""
        spans = []
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        for size in range(min(self._max_length - 1, end - begin), 0, -1):
            if text[begin : begin + size] in self._endings:
                spans.append((begin, begin + size))
                break
        for size in range(min(self._max_length - 1, end - begin), 0, -1):
            if text[end - size : end] in self._beginnings:
                spans.append((end - size, end))
                break
        return spans

    def written(self, text: str) -> str:
        """The rendering of marked messages, with OF_TEMPLATE before each special token that the template has written,
        and without the marks of messages."""
        return self._of_template.sub(rf"{OF_TEMPLATE}\1", text).replace(IN_CONTENT, "")

    def encode(self, texts: Sequence[str], marked: bool) -> list[Encoded | BadRowError]:
        """Encode texts as one batch; or why a text cannot be encoded. marked: whether they are results of `written`."""
        tokenizer = self._marked_tokenizer if marked else self._tokenizer
        found: list[Encoded | BadRowError] = []
        for text, encoding in zip(texts, _encode(tokenizer, texts), strict=True):
            if isinstance(encoding, BadRowError):
                found.append(encoding)
                continue
            ids = np.array(encoding.ids, np.int64)
            is_special = np.isin(ids, self._id_array)
            hits = (self._of_template_marked if marked else self._text).finditer(text)
            if ids[is_special].tolist() == [self._ids[hit[0]] for hit in hits if hit[0] in self._ids]:
                offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
                found.append(Encoded(ids, offsets, is_special, _is_partial(text, offsets)))
            else:
                found.append(
                    BadRowError("the tokenizer finds special tokens in it that the chat template has not written")
                )
        return found

    @cached_property
    def _marked_tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer with OF_TEMPLATE before the name of each special token; the ids are the same."""
        content = json.loads(self._content)
        texts = {token["content"] for token in content["added_tokens"] if token["special"]}
        for token in content["added_tokens"]:
            token["content"] = _renamed(token["content"], texts)
        model = content["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {_renamed(text, texts): token_id for text, token_id in model["vocab"].items()}
        else:
            model["vocab"] = [[_renamed(text, texts), score] for text, score in model["vocab"]]
        if model.get("unk_token"):
            model["unk_token"] = _renamed(model["unk_token"], texts)
        if "merges" in model:
            pairs = (merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"])
            model["merges"] = [[a, b] for a, b in pairs if texts.isdisjoint((a, b, a + b))]
        tokenizer = _open(json.dumps(content).encode())
        if any(tokenizer.token_to_id(OF_TEMPLATE + text) != token_id for text, token_id in self._ids.items()):
            raise UserError("the tokenizer's special tokens cannot be told from text that looks like them")
        return tokenizer


def _is_partial(text: str, offsets: npt.NDArray[np.int64]) -> bool:
    """Whether a visible character of the text is in no token."""
    begins, ends = np.append(offsets[:, 0], len(text)), np.maximum.accumulate(np.append(0, offsets[:, 1]))
    return any(is_visible(text[ends[gap] : begins[gap]]) for gap in np.flatnonzero(begins > ends))


def _open(content: bytes) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _renamed(text: str, special: set[str]) -> str:
    return OF_TEMPLATE + text if text in special else text


def _texts(value: Any, *, names: bool = True) -> Iterator[str]:
    """All texts of a JSON value. names: also those of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if names:
                yield name
            yield from _texts(item, names=names)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, names=names)


def _encode(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> list[tokenizers.Encoding | BadRowError]:
    """Encode texts as one batch; or why a text cannot be encoded."""
    try:
        return list(tokenizer.encode_batch(list(texts), add_special_tokens=False))
    except BaseException as error:
        if not is_error(error):
            raise
        if len(texts) == 1:
            return [BadRowError(f"the tokenizer cannot encode it: {error}")]
        return [_encode(tokenizer, [text])[0] for text in texts]
