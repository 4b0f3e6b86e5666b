"""Chat templates: Jinja text that turns messages into the text of a conversation, as in transformers."""

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from titanlite.data.chat.messages import Message
from titanlite.data.sources.pieces import BadRowError
from titanlite.runtime.errors import UserError

GENERATION_START, GENERATION_END, IN_CONTENT, OF_TEMPLATE = MARKS = "\ufdd2\ufdd3\ufdd4\ufdd5"
"""Characters that mark a rendered text, then are removed from it: the start and end of {% generation %}, the text of a
special token in a message, and a special token that the template has written. Unicode keeps them free for such internal
use (noncharacters); rows and templates that contain them are refused."""

_GENERATION_MARKS = re.compile(f"([{GENERATION_START}{GENERATION_END}])")

TEMPLATE_DATE = date(2024, 7, 26)
"""The day that strftime_now gives: the one that templates of Llama 3 write if they have no clock."""


NO_VALUES: Mapping[str, Any] = {}
"""Of a conversation that is only messages."""


class Rendered(NamedTuple):
    """A rendered conversation. spans: (begin, end) in characters of each {% generation %} block, in order."""

    text: str
    spans: list[tuple[int, int]]


class ChatTemplate:
    """A compiled chat template, in the sandbox of jinja2: no files, no network, no attributes of Python's own.

    Templates find what transformers gives them: messages, add_generation_prompt, the special tokens by name
    (bos_token), the tools and other values of a row, documents (none unless a row has them), the filter tojson,
    raise_exception, strftime_now, break, continue and {% generation %}. strftime_now does not read the clock, but
    formats TEMPLATE_DATE: the same data give the same tokens on every day.

    The sandbox bounds range() to 100,000 numbers, and the size of nothing else: a template can take any amount of time
    and memory, so use only templates that you trust that far.

    source: its text. marks_generation: whether it has {% generation %}. reads: names of values that a row can have.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens: name -> text, such as {"eos_token": "</s>"}. Raises UserError for a syntax error."""
        if any(mark in source for mark in MARKS):
            raise UserError("the chat template has one of the characters U+FDD2 to U+FDD5, which titanlite reserves")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": TEMPLATE_DATE.strftime,
            "dict": _dict,
            "namespace": _Namespace,
        }
        try:
            self._template = environment.from_string(source)
            names = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"the chat template has a syntax error in line {error.lineno}: {error.message}") from None
        except Exception as error:  # of Python's compiler, such as a break outside a loop
            raise UserError(f"the chat template cannot be compiled: {error}") from None
        (generation,) = (one for one in environment.extensions.values() if isinstance(one, _Generation))
        self.source = source
        self.reads = names.difference(environment.globals, special_tokens, ("messages", "add_generation_prompt"))
        self.marks_generation = generation.is_used
        self._special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[Message], values: Mapping[str, Any] = NO_VALUES, *, prompts: bool = False
    ) -> str:
        """The text of a conversation, with the marks of {% generation %} in it: see `unmarked`.

        values: what else the template finds, by name: see Conversation. prompts: whether the text ends with the prompt
        for the assistant's next turn (add_generation_prompt). Raises BadRowError, which names the turn that the
        template refuses.
        """
        try:
            return self._render(messages, values, prompts)
        except Exception as error:  # any of Python's, beside those of jinja2
            reason = _reason(error)
        count = len(messages)

        def is_refused(first: int) -> bool:
            """Whether the first messages fail in the same way."""
            try:
                self._render(messages[:first], values, prompts and first == count)
            except Exception as error:
                return _reason(error) == reason
            return False

        turn = bisect_left(range(1, count), True, key=is_refused) + 1
        raise BadRowError(f"turn {turn}: {reason}" if messages else reason)

    def _render(self, messages: Sequence[Message], values: Mapping[str, Any], prompts: bool) -> str:
        given = {**self._special_tokens, "tools": None, "documents": None, **values}
        return self._template.render(given, messages=messages, add_generation_prompt=prompts)


def unmarked(text: str) -> Rendered:
    """Remove the marks of {% generation %} from a rendered text, and return the places of the blocks."""
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    length = depth = begin = 0
    for part in _GENERATION_MARKS.split(text):
        if part == GENERATION_START:
            begin, depth = begin if depth else length, depth + 1
        elif part == GENERATION_END:
            depth -= 1
            if not depth:
                spans.append((begin, length))
        else:
            parts.append(part)
            length += len(part)
    return Rendered("".join(parts), spans)


class _Generation(Extension):
    """{% generation %} … {% endgeneration %}: the block in between is what the assistant writes.

    The block is written between two marks, so its place is found wherever a template moves it, also out of macros.
    Names that the block sets end with it.
    """

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)
    is_used = False

    def parse(self, parser: Parser) -> nodes.Node:
        self.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (GENERATION_START, GENERATION_END))
        return nodes.Scope([start, *body, end]).set_lineno(line)


class _Namespace(Namespace):
    """jinja2's namespace() without names that start with an underscore, which would reach Python's own attributes."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *given = args
        found = dict(*given, **values)
        for name in found:
            _require_public(name)
        Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _dict(*args: Any, **values: Any) -> dict[Any, Any]:
    """dict() without the attributes of the class."""
    return dict(*args, **values)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON, not escaped for HTML. Marks stay characters, so that they can be removed again."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace(f"\\u{ord(IN_CONTENT):04x}", IN_CONTENT) if ensure_ascii else text


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _reason(error: Exception) -> str:
    return f"the chat template refuses it: {str(error) or type(error).__name__}"
