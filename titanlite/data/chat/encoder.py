"""Conversations as tokens, and which of these are trained on."""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from titanlite.data.chat.messages import ASSISTANT, KNOWN_ROLES, TOOLS, VALUES, Conversation, Message, require_answer
from titanlite.data.chat.special_tokens import Encoded, SpecialTokens
from titanlite.data.chat.template import NO_VALUES, ChatTemplate, unmarked
from titanlite.data.sources.pieces import BadRowError
from titanlite.runtime.errors import UserError
from titanlite.runtime.text import is_visible

LossOn = Literal["assistant", "all"]

PROBE = ("What comes after seven?", "Eight")
"""A question and its answer: what a template writes after the answer ends a turn of the assistant."""
_NEXT = "What comes before?"
"""A question that follows the answer."""

NO_END = "an answer of the model ends only at EOS, which it may not learn to write, or at the length limit"
"""What follows from ChatEncoder.fault_of_end."""
MAX_CHARACTERS = 4_000_000
"""Limit of the text of a conversation, whose encoding takes up to 200 bytes for each character."""
MAX_RENDERED = 1_000
"""Limit of the turns of a conversation that are rendered one by one, each with those before it."""
_UNKNOWN = (
    "it is not known which tokens the assistant writes: mark its text in the chat template with {% generation %} and "
    "{% endgeneration %}"
)


class ChatTokenizer(Protocol):
    """What a ChatEncoder reads of a titanlite.data.tokenizer.Tokenizer.

    content: of a tokenizer.json with the added tokens of all files. chat_tokens: those
    that change only conversations. special_tokens: name -> text, such as {"eos_token": "</s>"}.
    """

    @property
    def content(self) -> bytes: ...

    chat_tokens: list[list[Any]]
    special_tokens: dict[str, str]
    chat_template: str | None
    eos_id: int | None
    description: str

    def encode(self, text: str) -> list[int]: ...

    def has_text(self, ids: Sequence[int]) -> bool: ...


class EncodedChat(NamedTuple):
    """A conversation. tokens: int64 (n,). trained: bool (n,), whether a token is a target of the loss."""

    tokens: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_]


class _Turn(NamedTuple):
    """A turn of the assistant: its number from 1, and its place in the text, in characters."""

    number: int
    begin: int
    end: int


class _Text(NamedTuple):
    """A rendered text. marked: whether special tokens of the template are marked in it, see SpecialTokens."""

    text: str
    marked: bool


class _Rendered(NamedTuple):
    """spans: (begin, end) of each block {% generation %}, in characters."""

    text: _Text
    spans: list[tuple[int, int]]


class _Draft(NamedTuple):
    """A rendered conversation. turns: of the assistant, if they are needed: the template has no {% generation %}."""

    text: _Text
    spans: list[tuple[int, int]]
    turns: list[_Turn]


class _Cut(NamedTuple):
    """Begin or end of turn `number`. text: the part of the conversation from token `first` to there."""

    number: int
    first: int
    text: _Text


class ChatEncoder:
    """Encodes conversations by the chat template of a tokenizer.

    Special tokens that the template writes become their ids. The same text in a message stays text. Added tokens that
    are not special, such as Qwen's <think>, are found in both. Only the template adds BOS and EOS.

    stop_ids: the added token with which the template ends a turn of the assistant, if any, and EOS, if any.
    fault_of_end: why the template ends a turn with no such token, or with one that is not trained on; "" if it does.
    fingerprint: a hash of the template and of the special tokens that it can name.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        """Raises UserError if the tokenizer has no chat template, or one that cannot be compiled."""
        if tokenizer.chat_template is None:
            raise UserError(
                f"the tokenizer has no chat template ({tokenizer.description}): write one with tokens of its "
                'vocabulary, and set [tokenizer] chat_template = "FILE.jinja"'
            )
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
        self._special_tokens = SpecialTokens(tokenizer.content)
        named = json.dumps([tokenizer.chat_template, tokenizer.special_tokens, *tokenizer.chat_tokens], sort_keys=True)
        self.fingerprint = hashlib.sha256(named.encode()).hexdigest()
        end, self.fault_of_end = self._end_of_turn()
        self.stop_ids = tuple(dict.fromkeys(token for token in (end, tokenizer.eos_id) if token is not None))

    def encode(self, conversations: Sequence[Conversation], loss_on: LossOn) -> list[EncodedChat | BadRowError]:
        """The tokens of each conversation, computed as one batch; or why it cannot be used.

        loss_on "all": every token is trained on. "assistant": the tokens that share a character with a block
        {% generation %} of the template, as in transformers. If the template has no such blocks: the tokens that it
        writes for each turn of the assistant after the generation prompt. They are found by rendering the conversation
        before the turn and with it; it is refused if the tokens of these parts are not the first ones of its tokens.
        A turn that the template writes without its reasoning, since others follow, is trained on without it.
        """
        drafts = [self._draft(conversation, loss_on) for conversation in conversations]
        rendered = [draft for draft in drafts if isinstance(draft, _Draft)]
        encoded = self._encode(draft.text for draft in rendered)
        parts = self._encode(cut.text for draft in rendered for cut in _cuts(draft, encoded[draft.text]))
        return [
            draft
            if isinstance(draft, BadRowError)
            else self._removed(given.messages, encoded[draft.text])
            or _result(draft, encoded[draft.text], parts, loss_on)
            for given, draft in zip(conversations, drafts, strict=True)
        ]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation with the prompt for the assistant's next turn. Raises UserError."""
        self._require_prompt()
        try:
            text = self._prompted(messages)
            (encoded,) = self._encode([text]).values()
            if bad := self._removed(messages, encoded):
                raise bad
            if isinstance(encoded, BadRowError):
                raise encoded
        except BadRowError as bad:
            raise UserError(f"the conversation cannot be encoded: {bad}") from None
        return [int(token) for token in encoded.ids]

    def fault_of_system(self, text: str) -> str:
        """Why no conversation can begin with the system message `text`; "" if one can."""
        try:
            self._prompted([{"role": "system", "content": text}, {"role": "user", "content": PROBE[0]}])
        except BadRowError as bad:
            return str(bad)
        return ""

    def _prompted(self, messages: Sequence[Message]) -> _Text:
        """The text of a conversation with the prompt for the assistant's next turn. Raises BadRowError."""
        given, _, marked = self._special_tokens.mark(messages)
        text, _ = self._render(given, marked, prompts=True)
        self._require_roles(given, text, KNOWN_ROLES - {"system", "developer"}, prompts=True)
        return text

    def _draft(self, conversation: Conversation, loss_on: LossOn) -> _Draft | BadRowError:
        """Render a conversation."""
        messages = conversation.messages
        answers = [index for index, message in enumerate(messages) if message.get("role") == ASSISTANT]
        try:
            if loss_on == ASSISTANT:
                require_answer(messages)
            self._require_fields(conversation)
            self._require_tool_calls(messages)
            given, values, marked = self._special_tokens.mark(messages, conversation.values)
            text, spans = self._render(given, marked, values)
            self._require_roles(given, text, KNOWN_ROLES, values)
            finds_turns = loss_on == ASSISTANT and not self._template.marks_generation
            if finds_turns and len(answers) > MAX_RENDERED:
                raise BadRowError(
                    f"it has {len(answers):,} turns of the assistant, more than {MAX_RENDERED:,}: mark their text in "
                    "the chat template with {% generation %} and {% endgeneration %}"
                )
            return _Draft(text, spans, [self._turn(given, index, text, values) for index in answers if finds_turns])
        except BadRowError as bad:
            return bad

    def _require_fields(self, conversation: Conversation) -> None:
        """Raise BadRowError if a field of the row would be lost: its tools, or another one that the template reads."""
        reads = self._template.reads
        if TOOLS in conversation.values and TOOLS not in reads:
            remedy = "write them into the content of a system message, or use a template that reads them"
            raise BadRowError(f"the row has {TOOLS!r}, which the chat template does not read: {remedy}")
        if lost := sorted(conversation.others & reads):
            remedy = f'write it into {VALUES!r}: {{"{lost[0]}": ...}}, or remove it'
            raise BadRowError(f"the row has {lost[0]!r} beside its turns, which the chat template reads: {remedy}")

    def _require_tool_calls(self, messages: Sequence[Message]) -> None:
        """Raise BadRowError if a message has tool calls, and the template writes none."""
        if "tool_calls" not in self._template.source:
            for number, message in enumerate(messages, 1):
                if message.get("tool_calls"):
                    raise BadRowError(f"turn {number}: it has tool_calls, which the chat template does not write")

    def _require_roles(
        self,
        messages: Sequence[Message],
        full: _Text,
        known: Collection[str],
        values: Mapping[str, Any] = NO_VALUES,
        *,
        prompts: bool = False,
    ) -> None:
        """Raise BadRowError if the text does not have the content of a turn whose role is not one of `known`.

        Such as a typing error, or instructions that a template ignores: with another content, the text is the same.
        """
        unknown = [
            index for index, each in enumerate(messages) if each.get("role") not in known and each.get("content")
        ]
        if len(unknown) > MAX_RENDERED:
            raise BadRowError(f"it has {len(unknown):,} turns of unusual roles, more than {MAX_RENDERED:,}")
        for index in unknown:
            message = messages[index]
            role, content = message.get("role"), message["content"]
            other = [*messages[:index], {**message, "content": content + PROBE[1]}, *messages[index + 1 :]]
            if self._render(other, full.marked, values, prompts=prompts).text == full:
                raise BadRowError(f"turn {index + 1}: the chat template writes nothing for the role {role!r}")

    def _render(
        self, messages: Sequence[Message], marked: bool, values: Mapping[str, Any] = NO_VALUES, *, prompts: bool = False
    ) -> _Rendered:
        """Render the messages and values of SpecialTokens.mark. Raises BadRowError."""
        text = self._template.render(messages, values, prompts=prompts)
        if len(text) > MAX_CHARACTERS:
            raise BadRowError(f"its text has {len(text):,} characters, more than {MAX_CHARACTERS:,}")
        text, spans = unmarked(self._special_tokens.written(text) if marked else text)
        return _Rendered(_Text(text, marked), spans)

    def _turn(self, messages: Sequence[Message], index: int, full: _Text, values: Mapping[str, Any]) -> _Turn:
        """The place of a turn of the assistant in the text of the conversation. Raises BadRowError."""

        def text(messages: Sequence[Message], *, prompts: bool = False) -> str:
            return self._render(messages, full.marked, values, prompts=prompts).text.text

        try:
            before = text(messages[:index], prompts=True)
            until = text(messages[: index + 1])
            if not full.text.startswith(until):
                # The turn is written otherwise if others follow, for example without reasoning: it ends where the text
                # begins that the later turns add to the turns before it.
                with suppress(BadRowError):  # a template may refuse the later turns without this one
                    shorter = text(messages[:index])
                    others = text([*messages[:index], *messages[index + 1 :]])
                    added = others.removeprefix(shorter)
                    if others.startswith(shorter) and full.text.endswith(added):
                        until = full.text[: len(full.text) - len(added)]
        except BadRowError as bad:
            raise BadRowError(f"turn {index + 1}: a part of the conversation cannot be rendered: {bad}") from None
        if until.startswith(before) and full.text.startswith(until):
            return _Turn(index + 1, len(before), len(until))
        raise BadRowError(
            f"turn {index + 1}: the chat template writes other text for the part of the conversation up to it than for "
            f"the full conversation, so {_UNKNOWN}"
        )

    def _encode(self, texts: Iterable[_Text]) -> dict[_Text, Encoded | BadRowError]:
        """Encode each text once, in batches of up to MAX_CHARACTERS."""
        different = dict.fromkeys(texts)
        found: dict[_Text, Encoded | BadRowError] = {}
        for marked in (False, True):
            for batch in _batches(text for text in different if text.marked == marked):
                found |= zip(batch, self._special_tokens.encode([text.text for text in batch], marked), strict=True)
        return found

    def _removed(self, messages: Sequence[Message], encoded: Encoded | BadRowError) -> BadRowError | None:
        """Why the conversation cannot be used: the tokenizer removes all text of a message, as its normalizer may."""
        if isinstance(encoded, BadRowError) or not encoded.is_partial:
            return None
        for number, message in enumerate(messages, 1):
            for name in ("reasoning_content", "content"):
                text = message.get(name) or ""
                if is_visible(text) and not self._tokenizer.has_text(self._tokenizer.encode(text)):
                    return BadRowError(f"turn {number}: the tokenizer removes all text of its {name}")
        return None

    def _require_prompt(self) -> None:
        """Raise UserError if an answer does not follow the prompt for the assistant's turn."""
        if not self._has_prompt:
            raise UserError(
                "the chat template does not write what is before an answer: end it with "
                "{% if add_generation_prompt %}, this text and {% endif %}"
            )

    @cached_property
    def _has_prompt(self) -> bool:
        """Whether an answer follows the prompt for the assistant's turn; True if the template refuses the probe."""
        question, answer = PROBE
        asked = [{"role": "user", "content": question}]
        try:
            prompt, plain = (self._render(asked, False, prompts=prompts).text.text for prompts in (True, False))
            full = self._render([*asked, {"role": ASSISTANT, "content": answer}], False).text.text
        except BadRowError:  # the template wants another conversation
            return True
        # Without add_generation_prompt, all that is before an answer may belong to the question, as "[/INST]".
        return prompt != plain or full.removeprefix(prompt).lstrip().startswith(answer)

    def _end_of_turn(self) -> tuple[int | None, str]:
        """The added token with which the template ends a turn of the assistant, special or not; or None and why.

        It is the last one that is trained on, since the first one may be </think>, of those after each answer, or else
        of those after the last answer.
        """
        question, answer = PROBE
        probe = [{"role": "user", "content": question}, {"role": ASSISTANT, "content": answer}]
        try:
            text, spans = self._render(probe, False)
            encoded = self._encode([text])[text]
            if isinstance(encoded, BadRowError):
                raise encoded
        except BadRowError as bad:  # the template may want another conversation
            return None, f"the chat template's end of a turn is not known: {bad}"
        begin, found, written = text.text.rpartition(answer)
        if not found:
            return None, f"the chat template's end of a turn is not known: it does not write the answer {answer!r}"
        marks = self._special_tokens.marks
        place = len(begin) + len(answer)
        found_marks = [
            (token_id, start, end)
            for token_id, (start, end) in zip(encoded.ids.tolist(), encoded.offsets.tolist(), strict=True)
            # The token of unknown characters may be one of them, also where its text was not written.
            if start >= place and marks.get(token_id) == text.text[start:end].strip()
        ]
        until = place + self._shared_end(probe, written)
        found_marks = [mark for mark in found_marks if mark[2] <= until] or found_marks
        if found_marks:
            trained = _in_spans(np.array(found_marks)[:, 1:], spans or [(0, len(text.text))])
            token_id, start, end = found_marks[np.flatnonzero(trained)[-1] if trained.any() else -1]
            outside = f"the chat template writes {text.text[start:end].strip()!r} outside of its {{% generation %}}"
            return token_id, "" if trained.any() else outside
        if not written.strip():
            return None, "the chat template writes nothing at the end of a turn"
        mark = repr(written.strip())
        return None, f"the chat template ends a turn with {mark}, which is no added token of the tokenizer"

    def _shared_end(self, probe: Sequence[Message], written: str) -> int:
        """How many characters of `written`, which follow the answer of the probe, also follow it before a question."""
        try:
            longer = [*probe, {"role": "user", "content": _NEXT}, {**probe[-1], "content": _NEXT}]
            text = self._render(longer, False).text.text
        except BadRowError:
            return 0
        ended = text.partition(_NEXT)[0].rpartition(probe[-1]["content"])[2]
        return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(written, ended, strict=False)))


def _batches(texts: Iterable[_Text]) -> Iterator[list[_Text]]:
    """The texts in lists of up to MAX_CHARACTERS together."""
    batch, size = list[_Text](), 0
    for text in texts:
        if batch and size + len(text.text) > MAX_CHARACTERS:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text.text)
    if batch:
        yield batch


def _cuts(draft: _Draft, encoded: Encoded | BadRowError) -> Iterator[_Cut]:
    """Begin and end of each turn. Tokens before a special token do not depend on the text after it, so that only the
    text from the last special token on is encoded again: it is often the same for many turns."""
    if isinstance(encoded, BadRowError):
        return
    special = np.flatnonzero(encoded.is_special)
    ends = encoded.offsets[special, 1]
    text, marked = draft.text
    for number, *places in draft.turns:
        for place in places:
            last = int(np.searchsorted(ends, place, side="right")) - 1
            first = int(special[last]) if last >= 0 else 0
            begin = int(encoded.offsets[first, 0]) if last >= 0 else 0
            yield _Cut(number, first, _Text(text[begin:place], marked))


def _result(
    draft: _Draft, encoded: Encoded | BadRowError, parts: Mapping[_Text, Encoded | BadRowError], loss_on: LossOn
) -> EncodedChat | BadRowError:
    """parts: the text of each cut of the draft, encoded."""
    if isinstance(encoded, BadRowError):
        return encoded
    trained = np.ones(len(encoded.ids), bool) if loss_on == "all" else _in_spans(encoded.offsets, draft.spans)
    ends: list[int] = []
    for number, first, text in _cuts(draft, encoded):
        part = parts[text]
        if isinstance(part, BadRowError) or not np.array_equal(encoded.ids[first : first + len(part.ids)], part.ids):
            return BadRowError(
                f"turn {number}: its text and the text around it are encoded to common tokens, so {_UNKNOWN}"
            )
        ends.append(first + len(part.ids))
    for begin, end in zip(ends[::2], ends[1::2], strict=True):
        trained[begin:end] = True
    if not trained.any():
        return BadRowError("the chat template writes no text for it that is trained on")
    return EncodedChat(encoded.ids, trained)


def _in_spans(offsets: npt.NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Whether each token shares a character with a span. offsets: (n, 2) in characters; all are in order."""
    if not spans:
        return np.zeros(len(offsets), bool)
    begins, ends = np.array(spans).T
    # The first span that ends after the begin of a token, or one behind all text.
    nearest = np.searchsorted(ends, offsets[:, 0], side="right")
    shared: npt.NDArray[np.bool_] = offsets[:, 1] > np.append(begins, np.iinfo(np.int64).max)[nearest]
    return shared
