"""Tokens and masks of conversations, compared with those of transformers."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from tests.distributed.program import REPOSITORY
from tests.unit.data.chat.chat_templates import (
    MISTRAL,
    QWEN,
    SPECIAL,
    STYLES,
    WORDS,
    make_tokenizer,
    random_conversations,
    without_generation,
)
from titanlite.data.bpe import EOS
from titanlite.data.chat.encoder import ChatEncoder, EncodedChat
from titanlite.data.chat.messages import Conversation, Message, parse_row
from titanlite.data.chat.special_tokens import Encoded, SpecialTokens
from titanlite.data.chat.template import unmarked
from titanlite.data.config import DataConfig
from titanlite.data.corpus import build_encoder
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.pieces import BadRowError, PieceText, TokenPiece
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import UserError

COUNT = 60
ALL = [*STYLES, "old-mistral"]


@pytest.fixture(scope="module", params=ALL)
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(style: str, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    template = STYLES[style.removeprefix("old-")]
    return make_tokenizer(style, template, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> ChatEncoder:
    return ChatEncoder(tokenizer)


@pytest.fixture(scope="module")
def incremental(style: str, tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    """With the same template, without {% generation %}."""
    template = without_generation(STYLES[style.removeprefix("old-")])
    return ChatEncoder(make_tokenizer(style, template, tmp_path_factory.mktemp("incremental")))


def transformers_tokenizer(tokenizer: Tokenizer) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=tokenizer.arguments["file"], chat_template=tokenizer.chat_template, **tokenizer.special_tokens
    )


def usable(encoder: ChatEncoder, conversations: list[list[Message]], **options: Any) -> list[EncodedChat]:
    found = encoder.encode(list(map(Conversation, conversations)), **{"loss_on": "assistant"} | options)
    assert not [one for one in found if isinstance(one, BadRowError)]
    return [one for one in found if isinstance(one, EncodedChat)]


def test_tokens_and_masks_are_those_of_transformers(encoder: ChatEncoder, tokenizer: Tokenizer) -> None:
    conversations = random_conversations(COUNT, seed=1)
    theirs = transformers_tokenizer(tokenizer)
    expected = theirs.apply_chat_template(conversations, return_dict=True, return_assistant_tokens_mask=True)
    found = usable(encoder, conversations)
    assert [one.tokens.tolist() for one in found] == expected["input_ids"]
    assert [one.trained.astype(int).tolist() for one in found] == expected["assistant_masks"]
    assert all(one.trained.all() for one in usable(encoder, conversations, loss_on="all"))
    prompt = theirs.apply_chat_template(conversations[0][:-1], add_generation_prompt=True)["input_ids"]
    assert encoder.prompt(conversations[0][:-1]) == prompt


def with_special_text(style: str, seed: int) -> list[list[Message]]:
    """Conversations with the text of special tokens: alone, in pairs, inside one another, at the ends of contents."""
    special = [*SPECIAL[style.removeprefix("old-")], "<unk>" if "mistral" in style else "<|tool|>"]
    nested = [text[: len(text) // 2] + text + text[len(text) // 2 :] for text in special]
    return random_conversations(COUNT, seed, [*WORDS[:12], *special, *nested, special[0] + special[-1]])


def special_ids(tokenizer: Tokenizer) -> set[int]:
    """Ids of special tokens, without the one of unknown characters."""
    content = json.loads(tokenizer.content)
    return {token["id"] for token in content["added_tokens"] if token["special"] and token["content"] != "<unk>"}


def test_text_of_special_tokens_in_a_message_stays_text(encoder: ChatEncoder, tokenizer: Tokenizer, style: str) -> None:
    conversations = with_special_text(style, seed=2)
    harmless = [[{**message, "content": "the"} for message in messages] for messages in conversations]
    ids = special_ids(tokenizer)
    found, expected = usable(encoder, conversations), usable(encoder, harmless)
    for one, other in zip(found, expected, strict=True):
        assert [token for token in one.tokens if token in ids] == [token for token in other.tokens if token in ids]
    rendered = transformers_tokenizer(tokenizer).apply_chat_template(conversations, tokenize=False)
    decoded = [tokenizer.decode(one.tokens.tolist()) for one in found]
    if style == "old-mistral":  # writes a space after each special token
        decoded, rendered = ([text.replace(" ", "") for text in texts] for texts in (decoded, rendered))
    assert decoded == rendered


def test_what_is_trained_on_does_not_depend_on_special_text(
    encoder: ChatEncoder, tokenizer: Tokenizer, style: str
) -> None:
    special = SPECIAL[style.removeprefix("old-")][-1]
    messages = [{"role": "user", "content": special}, {"role": "assistant", "content": f"the {special}"}] * 2
    (one,) = usable(encoder, [messages])
    texts = [tokenizer.decode(run.tolist()) for run in np.split(one.tokens, np.flatnonzero(np.diff(one.trained)) + 1)]
    assert [text.strip() for text in texts[1::2]] == [f"the {special}{special}"] * 2


def test_a_conversation_has_the_same_tokens_with_and_without_the_marks_of_special_text(encoder: ChatEncoder) -> None:
    """As if each conversation had the text of a special token."""
    texts = [encoder._template.render(messages) for messages in random_conversations(COUNT, seed=5)]
    texts = [unmarked(text).text for text in texts]
    special = encoder._special_tokens
    plain, marked = special.encode(texts, False), special.encode([special.written(text) for text in texts], True)
    for one, other in zip(plain, marked, strict=True):
        assert isinstance(one, Encoded)
        assert isinstance(other, Encoded)
        assert one.ids.tolist() == other.ids.tolist()
        assert one.is_special.tolist() == other.is_special.tolist()


def test_turns_found_by_rendering_are_those_of_generation_blocks(
    encoder: ChatEncoder, incremental: ChatEncoder, style: str
) -> None:
    """If a block contains all that the template writes after the generation prompt. An answer is refused if its first
    line end and the one of the prompt are one token."""
    conversations = random_conversations(COUNT, seed=3) + with_special_text(style, seed=4)
    expected = usable(encoder, conversations)
    found = incremental.encode(list(map(Conversation, conversations)), "assistant")
    # The other templates trim the answer, or write a space before it.
    assert any(isinstance(one, BadRowError) for one in found) == (style == "qwen")
    for messages, one, other in zip(conversations, expected, found, strict=True):
        if isinstance(other, BadRowError):
            assert any(message["content"].lstrip(" ").startswith("\n") for message in messages)
            assert re.match(r"turn \d: .* encoded to common tokens, .* {% generation %}", str(other))
        else:
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.trained.tolist() == other.trained.tolist()


USER, ANSWER = {"role": "user", "content": "the"}, {"role": "assistant", "content": "model"}
NEW_LINE = {"role": "assistant", "content": "\nthe"}
PLAIN = without_generation(QWEN)
OTHER_PROMPT = PLAIN.replace("{{- '<|im_start|>assistant\\n' }}{%- endif", "{{- '<think>' }}{%- endif")
OTHER_LAST = without_generation(MISTRAL).replace("{{- ' '", "{{- ('<think>' if loop.last else ' ')")
KNOWN_ONLY = QWEN.replace("message in messages", "message in messages if message.role in ['user', 'assistant']")
EMPTY_BLOCK = "{% generation %}{% endgeneration %}<|im_end|>"
SURROGATE = QWEN + "{{ '\\ud800' if messages[1].name }}"
UNKNOWN = "it is not known which tokens the assistant writes: mark its text in the chat template with {% generation %}"


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (PLAIN, [USER, USER], "no turn has the role 'assistant', so there is nothing to train on: it has 'user'$"),
        (PLAIN, [USER, {"role": "assistant", "content": "\ufdd2"}], "turn 2: it has one of the characters U.FDD2 to"),
        (PLAIN, [USER, {"role": "assistant", "content": "a\ud800"}], r"turn 2: it has an unpaired surrogate, .ud800$"),
        (PLAIN, [USER | {"name": "a\0"}, ANSWER], "turn 1: it has a NUL character, which text does not have"),
        (SURROGATE, [USER, ANSWER | {"name": "the"}], "the tokenizer cannot encode it: "),
        (PLAIN, [USER, ANSWER | {"tool_calls": [{}]}], "turn 2: it has tool_calls, which the chat template does not"),
        (PLAIN, [ANSWER], "turn 1: a part of the conversation cannot be rendered: the chat template refuses it:"),
        (PLAIN, [USER, ANSWER, USER, NEW_LINE], f"turn 4: its text and .* to common tokens, so {UNKNOWN}"),
        (OTHER_PROMPT, [USER, ANSWER], f"turn 2: .* writes other text for the part .* up to it .*, so {UNKNOWN}"),
        (OTHER_LAST, [USER, ANSWER, USER, ANSWER], f"turn 2: .* writes other text .*, so {UNKNOWN}"),
        (KNOWN_ONLY, [USER, ANSWER, USER | {"role": "usr"}], "turn 3: .* writes nothing for the role 'usr'$"),
        (MISTRAL, [USER, ANSWER, ANSWER], "turn 3: the chat template refuses it: roles must alternate user/assistant"),
        (MISTRAL, [ANSWER], "turn 1: the chat template refuses it: roles must alternate user/assistant"),
        (QWEN, [USER, {"role": "assistant"}], "turn 2: the chat template refuses it: 'dict object' has no attribute"),
        (EMPTY_BLOCK, [USER, ANSWER], "the chat template writes no text for it that is trained on"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(template: str, messages: list[Message], reason: str, tmp_path: Path) -> None:
    """Others of the batch are encoded."""
    style = "mistral" if template in (MISTRAL, OTHER_LAST) else "qwen"
    encoder = ChatEncoder(make_tokenizer(style, template, tmp_path))
    good = [{"role": "user", "content": "a"}, ANSWER]
    found = encoder.encode(list(map(Conversation, (good, messages, good))), "assistant")
    assert re.match(reason, str(found[1]))
    assert isinstance(found[0], EncodedChat) or template in (OTHER_PROMPT, EMPTY_BLOCK)
    assert str(found[0]) == str(found[2])


def test_a_turn_that_the_template_shortens_if_others_follow(tmp_path: Path) -> None:
    """As by Qwen3, whose last answer alone has its reasoning, or an empty block in its place."""
    is_last = "messages[loop.index0:] | selectattr('role', 'eq', 'user') | list == []"
    template = QWEN.replace("{{- message.content", f"{{{{- ('<think>' if {is_last} else '') + message.content", 1)
    assert template != QWEN
    encoder = ChatEncoder(make_tokenizer("qwen", template, tmp_path))
    other = ChatEncoder(make_tokenizer("qwen", without_generation(template), tmp_path))
    tool = {"role": "tool", "content": "<|im_end|>"}
    conversations = [[USER, ANSWER, USER, ANSWER, tool, ANSWER], [USER, ANSWER, USER, tool, ANSWER]]
    for one, found in zip(usable(encoder, conversations), usable(other, conversations), strict=True):
        assert one.tokens.tolist() == found.tokens.tolist()
        assert one.trained.tolist() == found.trained.tolist()
    # The part before the second answer has the reasoning of the first one, which the conversation lacks.
    (bad,) = other.encode([Conversation([USER, ANSWER, tool, ANSWER, USER, ANSWER])], "assistant")
    assert str(bad).startswith("turn 4: the chat template writes other text")


WITH_TOOLS = (
    """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- if mode is defined %}{{ mode }}{% endif %}
{{- '<think>' if enable_thinking is defined and enable_thinking is false }}
"""
    + QWEN
)
TOOL = {"type": "function", "function": {"name": "words", "parameters": {"properties": {"of": {"type": "string"}}}}}


def test_tools_and_values_of_rows_are_rendered_as_in_transformers(tmp_path: Path) -> None:
    """Which TRL calls with these two fields of each row."""
    encoder = ChatEncoder(tokenizer := make_tokenizer("qwen", WITH_TOOLS, tmp_path))
    incremental = ChatEncoder(make_tokenizer("qwen", without_generation(WITH_TOOLS), tmp_path / "incremental"))
    theirs = transformers_tokenizer(tokenizer)
    given: list[tuple[list[Any] | None, dict[str, Any]]] = [
        (None, {}),
        ([TOOL], {}),
        ([TOOL, TOOL], {"enable_thinking": False, "unread": 1}),
        (None, {"mode": "the model", "enable_thinking": True}),
    ]
    messages, found = [USER, ANSWER, USER, ANSWER], []
    for tools, values in given:
        row = {"messages": messages, "chat_template_kwargs": values, "id": 3}
        rows = [parse_row(row | {"tools": written}) for written in (tools, tools and json.dumps(tools))]
        found += encoder.encode([*rows, rows[0]], "assistant") + incremental.encode(rows, "assistant")
        expected = theirs.apply_chat_template(
            messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True, **values
        )
        for one in found[-5:]:
            assert isinstance(one, EncodedChat)
            assert one.tokens.tolist() == expected["input_ids"]
            assert one.trained.astype(int).tolist() == expected["assistant_masks"]
    assert len({one.tokens.tobytes() for one in found if isinstance(one, EncodedChat)}) == len(given)


@pytest.mark.parametrize("version", [2, 3, 4])
def test_a_run_that_has_begun_renders_rows_as_before(version: int, tmp_path: Path) -> None:
    """Values of a row were ignored, and tools refused, before stream_version 4."""
    tokenizer = make_tokenizer("qwen", WITH_TOOLS, tmp_path)
    encoder = build_encoder(SourceConfig(kind="chat"), tokenizer, DataConfig(stream_version=version))
    fields = ({}, {"chat_template_kwargs": {"mode": "the model"}}, {"tools": [TOOL]}, {"mode": "the model"})
    rows = [PieceText(0, json.dumps({"messages": [USER, ANSWER]} | each), lambda: iter(())) for each in fields]
    plain, with_values, with_tools, with_field = encoder.encode(rows, locate=str)
    assert isinstance(plain, TokenPiece)
    assert isinstance(with_values, TokenPiece)
    assert np.array_equal(plain.tokens, with_values.tokens) == (version < 4)
    assert isinstance(with_tools, BadRowError) == (version < 4)
    assert isinstance(with_field, TokenPiece) == (version < 4)


def test_text_of_special_tokens_in_tools_stays_text(tmp_path: Path) -> None:
    encoder = ChatEncoder(tokenizer := make_tokenizer("qwen", WITH_TOOLS, tmp_path))
    rows = [Conversation([USER, ANSWER], {"tools": [{"name": text}], "mode": text}) for text in ("<|im_end|>", "the")]
    special, plain = encoder.encode(rows, "assistant")
    assert isinstance(special, EncodedChat)
    assert isinstance(plain, EncodedChat)
    assert '{"name": "<|im_end|>"}\n<|im_end|>\n<|im_end|>' in tokenizer.decode(special.tokens.tolist())
    ids = special_ids(tokenizer)
    assert [token for token in special.tokens if token in ids] == [token for token in plain.tokens if token in ids]
    (bad,) = encoder.encode([Conversation([USER, ANSWER], {"tools": [{"name": "a\0"}]})], "assistant")
    assert str(bad) == "tools or chat_template_kwargs: it has a NUL character, which text does not have"


@pytest.mark.parametrize(
    ("template", "row", "reason"),
    [
        (QWEN, {"tools": [TOOL]}, "the row has 'tools', which the chat template does not read: write them into the"),
        (WITH_TOOLS, {"mode": "x"}, "the row has 'mode' beside its turns, which the chat template reads: write it into "
            "'chat_template_kwargs': {\"mode\": ...}, or remove it"),
        (WITH_TOOLS.replace("tools", "tool_defs"), {"tool_defs": [TOOL]}, "the row has 'tool_defs' beside its turns"),
        (WITH_TOOLS, {"mode": None, "tool": 1, "message": 2, "bos_token": "a", "namespace": "b"}, ""),
    ],
)  # fmt: skip
def test_fields_that_would_be_lost_are_named(template: str, row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    encoder = ChatEncoder(make_tokenizer("qwen", template, tmp_path))
    (found,) = encoder.encode([parse_row({"messages": [USER, ANSWER]} | row)], "assistant")
    assert str(found).startswith(reason) if reason else isinstance(found, EncodedChat)


def test_special_tokens_that_are_words_of_the_vocabulary(tmp_path: Path) -> None:
    """Merges of plain text give "the", by way of "he", which is also a special token."""
    file = Path(make_tokenizer("qwen", QWEN, tmp_path).arguments["file"])
    made = tokenizers.Tokenizer.from_file(str(file))
    assert made.token_to_id("he") is not None
    made.add_special_tokens(["he"])
    made.save(str(file))
    tokenizer = Tokenizer(file)
    (one,) = usable(ChatEncoder(tokenizer), [[ANSWER | {"role": "user"}, ANSWER | {"content": "the"}]])
    assert tokenizer.decode(one.tokens[one.trained].tolist()) == "the<|im_end|>\n"
    assert made.token_to_id("he") not in one.tokens[one.trained]


def test_stop_ids_are_the_end_of_a_turn_and_eos(encoder: ChatEncoder, tokenizer: Tokenizer, style: str) -> None:
    added = {token["content"]: token["id"] for token in json.loads(tokenizer.content)["added_tokens"]}
    end = added[SPECIAL[style.removeprefix("old-")][-1]]
    assert encoder.stop_ids == tuple(dict.fromkeys((end, tokenizer.eos_id)))


def test_only_special_tokens_end_a_turn(tmp_path: Path) -> None:
    """Not the line end that this template writes before it."""
    template = "{% for message in messages %}{{ message.content + '\\n<|im_end|>' }}{% endfor %}"
    tokenizer = make_tokenizer("qwen", template, tmp_path)
    assert tokenizer.decode(ChatEncoder(tokenizer).stop_ids[:1]) == "<|im_end|>"


def test_the_unknown_token_ends_a_turn_where_the_template_writes_it(tmp_path: Path) -> None:
    """Some vocabularies have one token for both. It is no end where it stands for an unknown character."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"<end>": 0, "</s>": 1}, [], unk_token="<end>"))
    library.add_special_tokens(["<end>", "</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    for written, end in (("<end>", 0), ("!</s>", 1)):
        (tmp_path / "chat_template.jinja").write_text("{{ messages[-1].content }}" + written)
        encoder = ChatEncoder(Tokenizer(tmp_path / "tokenizer.json"))
        assert (encoder.stop_ids, encoder.fault_of_end) == ((end,), "")


NO_MARK = "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"


BLOCK = "{{ messages[0].content }}{% generation %}{{ messages[1].content }}"


@pytest.mark.parametrize(
    ("template", "special", "end", "fault"),
    [
        (QWEN, True, "<|im_end|>", ""),
        (QWEN, False, "<|im_end|>", ""),
        (NO_MARK.replace("'\\n'", "'\\n<|im_end|>'"), False, "<|im_end|>", ""),
        (QWEN.replace("<|im_end|>", "</think><|im_end|>"), False, "<|im_end|>", ""),
        (NO_MARK.replace("'\\n'", f"'<|im_end|>' + ('{EOS}' if loop.last else '')"), True, "<|im_end|>", ""),
        (NO_MARK.replace("'\\n'", "('</think><|im_end|>' if loop.last else '')"), True, "<|im_end|>", ""),
        (QWEN.replace("{% endgeneration %}", f"{{% endgeneration %}}{EOS}"), True, "<|im_end|>", ""),
        (QWEN.replace("<|im_end|>", "<|end|>"), True, None, "ends a turn with '<|end|>', which is no added token"),
        (NO_MARK, True, None, "writes nothing at the end of a turn"),
        (f"{BLOCK}{{% endgeneration %}}<|im_end|>", True, "<|im_end|>", "outside of its {% generation %}"),
        (f"{BLOCK}<|im_end|>{{% endgeneration %}}", True, "<|im_end|>", ""),
        ("{{ messages[0].content }}", True, None, "does not write the answer 'Eight'"),
        ("{{ raise_exception('no') }}", True, None, "is not known: "),
    ],
)
def test_the_end_of_a_turn_follows_from_the_template(
    template: str, special: bool, end: str | None, fault: str, tmp_path: Path
) -> None:
    """Also if its token is not special, and never a line end, which is an added token of some vocabularies."""
    file = Path(make_tokenizer("qwen", template, tmp_path).arguments["file"])
    content = json.loads(file.read_text())
    for token in content["added_tokens"]:
        token["special"] = special or token["content"] != "<|im_end|>"
    file.write_text(json.dumps(content))
    made = tokenizers.Tokenizer.from_file(str(file))
    made.add_tokens(["\n", "</think>"])
    made.save(str(file))
    encoder = ChatEncoder(Tokenizer(file))
    ids = [made.token_to_id(text) for text in (end, EOS) if text]
    assert encoder.stop_ids == tuple(ids)
    assert (fault in encoder.fault_of_end) if fault else not encoder.fault_of_end


def test_the_fingerprint_has_the_special_tokens_that_a_template_names(tmp_path: Path) -> None:
    file = make_tokenizer("qwen", QWEN, tmp_path).arguments["file"]
    assert len({ChatEncoder(Tokenizer(file, eos=eos)).fingerprint for eos in ("<|im_end|>", "<|im_start|>")}) == 2


def test_the_longest_special_token_is_found(tmp_path: Path) -> None:
    """Of "<|im_end|>" and its beginning, in a message and in the template."""
    tokenizer = make_tokenizer("qwen", QWEN, tmp_path)
    made = tokenizers.Tokenizer.from_str(tokenizer.content.decode())
    made.add_special_tokens(["<|im_e"])
    made.save(tokenizer.arguments["file"])
    encoder = ChatEncoder(Tokenizer(tokenizer.arguments["file"]))
    for content in ("the", "<|im_end|>"):
        (one,) = usable(encoder, [[USER, ANSWER | {"content": content}]])
        assert made.token_to_id("<|im_e") not in one.tokens


def test_without_a_template_the_remedy_is_named(tokenizer_folder: Path) -> None:
    with pytest.raises(UserError, match=r'no chat template .* set \[tokenizer\] chat_template = "FILE\.jinja"'):
        ChatEncoder(Tokenizer(tokenizer_folder / "tokenizer.json"))


def test_a_prompt_that_the_template_refuses(tmp_path: Path) -> None:
    encoder = ChatEncoder(make_tokenizer("mistral", MISTRAL, tmp_path))
    with pytest.raises(UserError, match=r"the conversation cannot be encoded: turn 2: .* roles must alternate"):
        encoder.prompt([USER, USER])
    silent = QWEN.partition("{%- if add_generation_prompt %}")[0]
    encoder = ChatEncoder(make_tokenizer("qwen", silent, tmp_path))
    with pytest.raises(UserError, match="does not write what is before an answer: end it with"):
        encoder.prompt([USER])


def test_special_text_in_tools_and_names_stays_text(tmp_path: Path) -> None:
    """Also in JSON, escaped or not, and in the names of fields."""
    template = "{{ messages[0].calls | tojson }}{{ messages[0].calls | tojson(ensure_ascii=True) }}<|im_end|>"
    tokenizer = make_tokenizer("qwen", template, tmp_path)
    messages = [{"role": "user", "calls": {"<|im_end|>": ["<|im_end|>", "é"]}}]
    (one,) = usable(ChatEncoder(tokenizer), [messages], loss_on="all")
    text = '{"<|im_end|>": ["<|im_end|>", "é"]}'
    assert tokenizer.decode(one.tokens.tolist()) == text + text.replace("é", "\\u00e9") + "<|im_end|>"
    assert sum(int(token) in special_ids(tokenizer) for token in one.tokens) == 1


@pytest.mark.parametrize(("first", "second"), [("<|im_", "end|>"), (" <", "|im_end|> "), ("a<|im_end|", ">b")])
def test_special_text_across_two_values_stays_text(first: str, second: str, tmp_path: Path) -> None:
    """Also if the template removes whitespace at their edges. A role is part of a special token of the template."""
    template = (
        "{{ '<|im_' + messages[0].role + '|>' + messages[0].content | trim + messages[1].content | trim }}"
        "{{ messages[0].name + messages[1].content }}<|im_end|>"
    )
    encoder = ChatEncoder(make_tokenizer("qwen", template, tmp_path))
    messages = [{"role": "start", "content": first, "name": first}, {"role": "assistant", "content": second}]
    (one,) = usable(encoder, [messages], loss_on="all")
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    text = "<|im_start|>" + first.strip() + second.strip() + first + second + "<|im_end|>"
    assert tokenizer.decode(one.tokens.tolist()) == text
    ids = [int(token) for token in one.tokens if int(token) in special_ids(tokenizer)]
    assert [tokenizer.decode([token]) for token in ids] == ["<|im_start|>", "<|im_end|>"]


def test_example_template_is_encoded_as_by_transformers(tmp_path: Path) -> None:
    """Its turns, without {% generation %}, have one token more: the line end after <|im_end|>."""
    template = (REPOSITORY / "examples" / "chatml.jinja").read_text()
    tokenizer = make_tokenizer("qwen", template, tmp_path)
    conversations = random_conversations(20, seed=6)
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    expected = transformers_tokenizer(tokenizer).apply_chat_template(conversations, **options)
    found = usable(ChatEncoder(tokenizer), conversations)
    assert [one.tokens.tolist() for one in found] == expected["input_ids"]
    assert [one.trained.astype(int).tolist() for one in found] == expected["assistant_masks"]
    assert all(not one.trained[-1] and one.trained[-2] for one in found)


@pytest.mark.parametrize(
    ("for_system", "fault"),
    [
        ("{{ message.content }}", ""),
        ("", "turn 1: the chat template writes nothing for the role 'system'"),
        ("{{ raise_exception('no system') }}", "turn 1: the chat template refuses it: no system"),
    ],
)
def test_system_messages_that_the_template_does_not_write(for_system: str, fault: str, tmp_path: Path) -> None:
    template = (  # writes a text of its own without a system message
        "{% if messages[0].role != 'system' %}Shout. <|im_end|>{% endif %}"
        "{% for message in messages %}{% if message.role == 'system' %}" + for_system + "{% else %}"
        "{{ message.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    found = ChatEncoder(make_tokenizer("qwen", template, tmp_path)).fault_of_system("Shout. <|im_end|>")
    assert found.endswith(fault)
    assert bool(found) == bool(fault)


def test_a_mistyped_role_is_refused_in_prompts(tmp_path: Path) -> None:
    encoder = ChatEncoder(make_tokenizer("qwen", KNOWN_ONLY, tmp_path))
    mistyped, right = [USER, ANSWER, USER | {"role": "usr"}], [USER, ANSWER, USER]
    assert encoder.prompt(right)
    with pytest.raises(UserError, match="turn 3: the chat template writes nothing for the role 'usr'"):
        encoder.prompt(mistyped)


@pytest.mark.parametrize("style", ["qwen", "llama"])
def test_a_message_of_which_the_tokenizer_removes_all_text(style: str, tmp_path: Path) -> None:
    """A message that keeps a character is used."""
    file = Path(make_tokenizer(style, STYLES[style], tmp_path).arguments["file"])
    content = json.loads(file.read_text())
    assert content["normalizer"] is None
    content["normalizer"] = {"type": "Replace", "pattern": {"Regex": "[日本]"}, "content": ""}
    file.write_text(json.dumps(content))
    encoder = ChatEncoder(Tokenizer(str(file)))
    removed, kept = {"role": "user", "content": "日本 日"}, {"role": "user", "content": "日本 a"}
    fault = "turn 1: the tokenizer removes all text of its content"
    conversations = [[removed, ANSWER], [kept, ANSWER], [kept | {"content": f"日{SPECIAL[style][-1]}"}, ANSWER]]
    bad, good, special = encoder.encode(list(map(Conversation, conversations)), "assistant")
    assert str(bad) == fault
    assert isinstance(good, EncodedChat)
    assert isinstance(special, EncodedChat)
    reasoning = ANSWER | {"reasoning_content": "日"}
    assert str(*encoder.encode([Conversation([kept, reasoning])], "all")) == (
        "turn 2: the tokenizer removes all text of its reasoning_content"
    )
    with pytest.raises(UserError, match=f"the conversation cannot be encoded: {fault}"):
        encoder.prompt([removed])


@pytest.fixture
def qwen(tmp_path: Path) -> ChatEncoder:
    """Without {% generation %}."""
    return ChatEncoder(make_tokenizer("qwen", without_generation(QWEN), tmp_path))


def test_conversations_that_take_gigabytes_or_hours_are_bad_rows(qwen: ChatEncoder) -> None:
    turns = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "the"}]
    long = [{"role": "user", "content": "the " * 1_000_000}, turns[1]]
    odd = [{"role": "narrator", "content": "the"}] * 1001
    found = [str(qwen.encode([Conversation(each)], "assistant")[0]) for each in (long, turns * 1001, [*odd, *turns])]
    assert re.search(r"its text has 4,\d{3},\d{3} characters, more than 4,000,000$", found[0])
    assert found[1].startswith("it has 1,001 turns of the assistant, more than 1,000: mark their text in the chat")
    assert found[2] == "it has 1,001 turns of unusual roles, more than 1,000"


def test_batches_are_of_limited_size(qwen: ChatEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    conversations = random_conversations(COUNT, seed=5)
    expected = usable(qwen, conversations, loss_on="all")
    limit, sizes, real = 2000, list[tuple[int, int]](), SpecialTokens.encode

    def noting(self: SpecialTokens, texts: list[str], marked: bool) -> Any:
        sizes.append((len(texts), sum(map(len, texts))))
        return real(self, texts, marked)

    monkeypatch.setattr("titanlite.data.chat.encoder.MAX_CHARACTERS", limit)
    monkeypatch.setattr(SpecialTokens, "encode", noting)
    for one, other in zip(usable(qwen, conversations, loss_on="all"), expected, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
    assert len(sizes) > 4
    assert all(count == 1 or size <= limit for count, size in sizes)
