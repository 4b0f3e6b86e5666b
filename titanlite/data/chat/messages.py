"""Conversations: the messages of a row in the two published formats, and what else a chat template gets of the row."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from titanlite.data.sources.config import CONVERSATION_FIELDS
from titanlite.data.sources.pieces import BadRowError

Message = Mapping[str, Any]
"""role, content, and other keys that a chat template may use, such as tool_calls and name."""

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Names in "from" -> the role that templates know. Other names are passed to the template as they are."""

ASSISTANT = "assistant"
"""The role whose turns are trained on."""

KNOWN_ROLES = frozenset({"system", "developer", "user", ASSISTANT, "tool", "function", "ipython"})
"""Roles of published templates. A template that ignores one of them in a row of data does so on purpose."""

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning. The first two are those that templates read."""

TOOLS = "tools"
"""The field of the tools: JSON objects in a list, or the text of one, which columns of any table can hold."""
VALUES = "chat_template_kwargs"
"""The field of further values, by the names under which the chat template reads them."""

OWN_VALUES = frozenset(
    {
        *("messages", TOOLS, "add_generation_prompt", "conversation", "chat_template", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
"""Names that VALUES cannot hold: the training decides about them."""

UNUSED = {
    "system": 'write it as the first message: {"role": "system", "content": ...}',
    "functions": f"write them as {TOOLS!r}",
    "documents": f"write them into {VALUES!r} if the chat template reads them, else into the content of a message",
}
"""Other fields that would change the meaning of a row if they were dropped -> what to do with them."""

WEIGHTS = ("weight", "train", "training")
"""Keys by which published data leave turns of the assistant out of the loss. Refused unless they train it fully."""


@dataclass(frozen=True)
class Conversation:
    """A conversation as chat templates get it.

    values: the tools and what VALUES holds, by name, if given. others: the names of the row's other fields that are not
    null; a template that reads one of them would be rendered without it.
    """

    messages: Sequence[Message]
    values: Mapping[str, Any] = field(default_factory=dict)
    others: frozenset[str] = frozenset()


def parse_row(row: object, *, reads_fields: bool = True) -> Conversation:
    """The conversation of a row: as parse_conversation, with `tools` and `chat_template_kwargs`, as TRL renders them.

    An empty list of tools stands for none. reads_fields: False: see DataConfig.reads_fields. Raises BadRowError.
    """
    messages = parse_conversation(row)
    assert isinstance(row, Mapping), "see parse_conversation"
    if not reads_fields:
        if row.get(TOOLS):
            raise BadRowError(f"the row has {TOOLS!r}, which is read only from data.stream_version = 4 on")
        return Conversation(messages)
    values = row.get(VALUES) or {}
    if not isinstance(values, Mapping):
        raise BadRowError(f"{VALUES!r} is not an object but {_type(values)}")
    if own := sorted(OWN_VALUES & values.keys()):
        raise BadRowError(f"{VALUES!r} has {own[0]!r}, about which the training decides: remove it")
    values = dict(values)
    if tools := _tools(row.get(TOOLS)):
        values[TOOLS] = tools
    known = {TOOLS, VALUES, *CONVERSATION_FIELDS}
    return Conversation(
        messages, values, frozenset(name for name in row if name not in known and row[name] is not None)
    )


def _tools(given: object) -> list[Any]:
    """The tools of a row; [] without any. Raises BadRowError."""
    if isinstance(given, str) and given.strip():
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise BadRowError(f"the text of {TOOLS!r} is not JSON: {error}") from None
    if not given:
        return []
    if not isinstance(given, list):
        raise BadRowError(f"{TOOLS!r} is not a list but {_type(given)}")
    for number, tool in enumerate(given, 1):
        if not isinstance(tool, Mapping):
            raise BadRowError(f"tool {number} of {TOOLS!r} is not an object but {_type(tool)}")
    return given


def parse_conversation(row: object) -> list[Message]:
    """The messages of a row: the list in `messages` or `conversations`, each with role and content, or from and value.

    A turn keeps its other keys, without those that are null. A content in parts, {"type": "text", "text": ...}, is
    joined to one text without separators; parts of other types are refused. Content may be missing if a turn has
    tool_calls. Reasoning is found under any of REASONING_KEYS, and passed under the first two.

    Raises BadRowError that names the turn, counted from 1.
    """
    if not isinstance(row, Mapping):
        raise BadRowError(f"not a JSON object but {_type(row)}")
    for name, remedy in UNUSED.items():
        if row.get(name):
            raise BadRowError(f"the row has {name!r} beside its turns, which would be lost: {remedy}")
    fields = [name for name in CONVERSATION_FIELDS if row.get(name) is not None]
    if not fields:
        present = ", ".join(repr(name) for name in list(row)[:8]) or "no field"
        raise BadRowError(f"fields 'messages' and 'conversations' are missing; the row has {present}")
    if len(fields) > 1:
        raise BadRowError("the row has both 'messages' and 'conversations': remove one of them")
    turns = row[fields[0]]
    if not isinstance(turns, list):
        raise BadRowError(f"{fields[0]!r} is not a list but {_type(turns)}")
    if not turns:
        raise BadRowError(f"{fields[0]!r} is empty")
    return [_message(turn, number) for number, turn in enumerate(turns, 1)]


def require_answer(messages: Sequence[Message]) -> None:
    """Raise BadRowError if the assistant writes nothing."""
    if not any(message.get("role") == ASSISTANT for message in messages):
        roles = ", ".join(dict.fromkeys(repr(message.get("role")) for message in messages))
        raise BadRowError(f"no turn has the role 'assistant', so there is nothing to train on: it has {roles}")


def _message(turn: object, number: int) -> Message:
    """Turn `number` of a row as a message. Raises BadRowError."""
    if not isinstance(turn, Mapping):
        raise BadRowError(f"turn {number}: not an object but {_type(turn)}")
    message = {key: value for key, value in turn.items() if value is not None}
    for name, other in (("role", "from"), ("content", "value")):
        if name in message and other in message:
            raise BadRowError(f"turn {number}: it has both {name!r} and {other!r}: remove one of them")
        if other in message:
            message[name] = message.pop(other)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        fault = "is missing" if role is None else "is empty" if role == "" else f"is not text but {_type(role)}"
        raise BadRowError(f"turn {number}: its role {fault}")
    if "from" in turn:
        message["role"] = ROLES.get(role, role)
    if "content" in message:
        message["content"] = _text(message["content"], number)
    elif not message.get("tool_calls"):
        raise BadRowError(f"turn {number}: its content is missing")
    for name in WEIGHTS:
        if message["role"] == ASSISTANT and message.get(name, 1) != 1:
            raise BadRowError(
                f"turn {number}: its {name!r} is {message[name]!r}, but all turns of the assistant are trained on "
                "alike: end the conversation before this turn, or remove the key"
            )
    reasoning = next((message[key] for key in REASONING_KEYS if key in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning} | message | {"reasoning_content": reasoning}
    return message


def _text(content: object, number: int) -> str:
    """The text of the content of turn `number`; parts are joined. Raises BadRowError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRowError(f"turn {number}: its content is not text but {_type(content)}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else None
            named = f"a part of type {kind!r}" if isinstance(kind, str) and kind != "text" else "a part without text"
            raise BadRowError(f"turn {number}: its content has {named}: only text can be trained on")
        texts.append(text)
    return "".join(texts)


def _type(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a text", list: "a list"}
    default = "an object" if isinstance(value, Mapping) else "a number"
    return names.get(type(value), default)
