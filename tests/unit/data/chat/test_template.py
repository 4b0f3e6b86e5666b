"""Rendering of chat templates."""

import re

import pytest

from titanlite.data.chat.template import ChatTemplate, unmarked
from titanlite.data.sources.pieces import BadRowError
from titanlite.runtime.errors import UserError

MESSAGES = [{"role": "user", "content": f"{n}"} for n in range(4)]


def rendered(template: str, **tokens: str) -> str:
    return unmarked(ChatTemplate(template, tokens).render(MESSAGES)).text


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}|{{ eos_token }}|{{ tools }}|{{ add_generation_prompt }}", "<s>||None|False"),
        ("  {% if true %}\n a\n  {% endif %}\nb\n", " a\nb"),
        ("{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}", "01"),
        ("{{ {'a': '<é\"'} | tojson }}", '{"a": "<é\\""}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ("{% set n = namespace(a=1) %}{% set n.a = dict(b=2).b %}{{ n.a }}", "2"),
    ],
)
def test_templates_find_what_transformers_gives_them(template: str, text: str) -> None:
    assert rendered(template, bos_token="<s>") == text


def test_places_of_generation_blocks() -> None:
    template = ChatTemplate(
        "{% macro say(text) %}[{% generation %}{{ text }}{% endgeneration %}]{% endmacro %}"
        "{% set kept %}{{ say('é😀') }}{% endset %}a{{ kept }}"
        "{%- generation -%} b {% set x = 1 %}{%- endgeneration %}{{ x }}c{% generation %}{% endgeneration %}",
        {},
    )
    text, spans = unmarked(template.render(MESSAGES))
    assert text == "a[é😀]b c"
    assert [text[begin:end] for begin, end in spans] == ["é😀", "b ", ""]
    assert template.marks_generation
    assert not ChatTemplate("{# {% generation %} #}{% raw %}{% generation %}{% endraw %}", {}).marks_generation


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("\n{% if %}", "the chat template has a syntax error in line 2: Expected an expression"),
        ("{% generation %}", "the chat template has a syntax error in line 1: Unexpected end of template"),
        ("{{ 1 | nothing }}", "the chat template has a syntax error in line 1: No filter named 'nothing'"),
        ("{% break %}", "the chat template cannot be compiled: 'break' outside loop"),
        ("\ufdd3", "the chat template has one of the characters U+FDD2 to U+FDD5, which titanlite reserves"),
    ],
)
def test_templates_that_cannot_be_used(template: str, fault: str) -> None:
    with pytest.raises(UserError, match=re.escape(fault)):
        ChatTemplate(template, {})


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ raise_exception('no') if m.content == '2' }}{% endfor %}", "turn 3: .*: no"),
        ("{{ messages[3].missing.more }}", "turn 4: .*: 'dict object' has no attribute 'missing'"),
        ("{{ raise_exception('never') }}", "turn 1: .*: never"),
        ("{{ ''.__class__.mro() }}", "turn 1: .* unsafe"),
        ("{{ dict.mro() }}", "turn 1: .*"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "turn 1: .* a namespace cannot hold '__class__'"),
        ("{{ messages.append(1) }}", "turn 1: .* unsafe"),
        ("{{ range(1000000) }}", "turn 1: .* Range too big"),
        ("{{ 1 // 0 }}", "turn 1: .*: .* by zero"),
    ],
)
def test_errors_of_a_template_are_bad_rows(template: str, reason: str) -> None:
    with pytest.raises(BadRowError, match=reason):
        rendered(template)
