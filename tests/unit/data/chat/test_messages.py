"""Messages of rows."""

import json
import re
from typing import Any

import pytest

from titanlite.data.chat.messages import Conversation, parse_conversation, parse_row
from titanlite.data.sources.pieces import BadRowError

HELLO = {"role": "user", "content": "hello"}


def test_both_formats_are_read() -> None:
    expected = [{"role": "system", "content": "s"}, HELLO, {"role": "assistant", "content": ""}]
    assert parse_conversation({"messages": expected, "id": 7}) == expected
    turns = [{"from": role, "value": text} for role, text in (("system", "s"), ("human", "hello"), ("gpt", ""))]
    assert parse_conversation({"conversations": turns, "messages": None, "tools": None}) == expected
    assert parse_conversation({"conversations": expected}) == expected


def test_other_keys_and_unknown_roles_are_kept() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}], "name": "n", "weight": None}
    assert parse_conversation({"messages": [call, {"from": "judge", "value": "x"}]}) == [
        {"role": "assistant", "tool_calls": [{"type": "function"}], "name": "n"},
        {"role": "judge", "content": "x"},
    ]
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert parse_conversation({"messages": [{"role": "user", "content": parts}]})[0]["content"] == "a b"
    for name in ("reasoning", "thinking", "reasoning_content"):
        (message,) = parse_conversation({"messages": [HELLO | {name: "why"}]})
        assert message == HELLO | {name: "why", "thinking": "why", "reasoning_content": "why"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([], "not a JSON object but a list"),
        ({"text": "a"}, "fields 'messages' and 'conversations' are missing; the row has 'text'"),
        ({"messages": [HELLO], "conversations": [HELLO]}, "the row has both 'messages' and 'conversations'"),
        ({"messages": "a"}, "'messages' is not a list but a text"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": [HELLO], "system": "x"}, "the row has 'system' beside its turns, which would be lost"),
        ({"messages": [HELLO, 3]}, "turn 2: not an object but a number"),
        ({"messages": [HELLO, {"content": "a"}]}, "turn 2: its role is missing"),
        ({"messages": [HELLO, {"role": "", "content": "a"}]}, "turn 2: its role is empty"),
        ({"messages": [HELLO, {"role": True, "content": "a"}]}, "turn 2: its role is not text but a boolean"),
        ({"messages": [HELLO, {"role": "user"}]}, "turn 2: its content is missing"),
        ({"messages": [HELLO, {"role": "user", "content": None, "tool_calls": []}]}, "turn 2: its content is missing"),
        ({"messages": [HELLO, {"role": "user", "content": {}}]}, "turn 2: its content is not text but an object"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "turn 1: its content has a part of type "),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "turn 1: its content has a part without text"),
        ({"messages": [HELLO, {"role": "assistant", "content": "a", "weight": 0}]}, "turn 2: its 'weight' is 0, but "),
        ({"conversations": [{"from": "gpt", "value": "a", "train": False}]}, "turn 1: its 'train' is False, but all "),
        ({"messages": [HELLO | {"value": "a"}]}, "turn 1: it has both 'content' and 'value'"),
    ],
)  # fmt: skip
def test_bad_rows_are_named_by_turn(row: Any, reason: str) -> None:
    with pytest.raises(BadRowError) as caught:
        parse_conversation(row)
    assert str(caught.value).startswith(reason)


def test_tools_and_values_of_a_row_are_read_and_other_fields_are_named() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {"messages": [HELLO], "id": 7, "empty": None, "chat_template_kwargs": {"enable_thinking": False}}
    expected = Conversation([HELLO], {"enable_thinking": False, "tools": tools}, frozenset({"id"}))
    assert parse_row(row | {"tools": tools}) == parse_row(row | {"tools": json.dumps(tools)}) == expected
    for none in ({}, {"tools": None}, {"tools": []}, {"tools": "[]"}, {"tools": ""}, {"chat_template_kwargs": None}):
        assert parse_row({"messages": [HELLO]} | none) == Conversation([HELLO])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"tools": {"name": "f"}}, "'tools' is not a list but an object"),
        ({"tools": [{}, "f"]}, "tool 2 of 'tools' is not an object but a text"),
        ({"tools": "f"}, "the text of 'tools' is not JSON: Expecting value: line 1"),
        ({"tools": "3"}, "'tools' is not a list but a number"),
        ({"chat_template_kwargs": "x"}, "'chat_template_kwargs' is not an object but a text"),
        ({"chat_template_kwargs": {"messages": []}}, "'chat_template_kwargs' has 'messages', about which the training"),
        ({"chat_template_kwargs": {"chat_template": ""}}, "'chat_template_kwargs' has 'chat_template', about which"),
    ],
)
def test_tools_and_values_of_another_form_are_bad_rows(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRowError, match=f"^{re.escape(reason)}"):
        parse_row({"messages": [HELLO], **row})
