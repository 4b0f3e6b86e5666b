"""Tasks: files of questions, as JSON lines, and their tokens."""

import hashlib
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from titanlite.data.chat.encoder import ChatEncoder
from titanlite.data.chat.messages import ASSISTANT, Message, parse_conversation
from titanlite.data.sources.pieces import BadRowError
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import Problem, UserError
from titanlite.runtime.json_files import JsonError, parse_json, read_regular

TaskFormat = Literal["multiple choice", "cloze"]
Text = Annotated[str, Field(min_length=1)]
MaybeEmpty = Annotated[str, Field(min_length=0)]
"""With a limit, pydantic also refuses unpaired surrogates, which no tokenizer takes."""
FORMATS = (
    'write "context" (a text) or "messages" (a conversation), and "choices" and "answer" (an index from 0) or "answer" '
    "(a text)"
)


@dataclass(frozen=True)
class Question:
    """A context and the texts that may continue it. answer: index of the right one; 0 in a cloze, which has one.

    context: a text, or a conversation, which the chat template writes with the prompt for the assistant's next turn.
    """

    context: str | tuple[Message, ...]
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Task:
    """The questions of a file. name: the file's, without its suffix. questions: at least one; number n is line n + 1.

    format: multiple choice: which of the choices is the most likely. cloze: whether the answer is the greedy one.
    digest: of the file.
    """

    name: str
    path: Path
    format: TaskFormat
    questions: tuple[Question, ...]
    digest: str

    @property
    def has_conversations(self) -> bool:
        """Whether a question has messages, which need a chat template."""
        return any(not isinstance(question.context, str) for question in self.questions)


@dataclass(frozen=True)
class Scored:
    """Tokens of a context and one of its choices, int64, of which those from `begin` on are scored."""

    tokens: npt.NDArray[np.int64]
    begin: int


@dataclass(frozen=True)
class EncodedTask:
    """A task in tokens. rows: of all choices, question by question. truncated: number of rows without the beginning of
    their context."""

    task: Task
    rows: tuple[Scored, ...]
    truncated: int

    def describe(self) -> str:
        """Name, format and numbers, for the log."""
        text = f"{self.task.name}, {self.task.format}: {len(self.task.questions):,} questions, {len(self.rows):,} rows"
        return f"{text}, {self.truncated:,} with a truncated context" if self.truncated else text


def read_task(path: str | Path) -> Task:
    """Read and check all questions. Raises UserError, which names the file and the line."""
    path = Path(path)
    try:
        content = read_regular(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except JsonError as error:
        raise UserError(f"{path} {error}") from None
    text = content.removeprefix(BOM_UTF8)  # written by some programs; not part of the JSON
    if not text.strip():
        raise UserError(f"{path} has no questions: {FORMATS}, one question per line")
    questions: list[Question] = []
    formats: list[TaskFormat] = []
    for number, line in enumerate(re.split(rb"\r\n?|\n", text.rstrip()), start=1):
        try:
            if not line.strip():
                raise JsonError("is blank: remove the line")
            row = parse_json(line)
            formats.append("multiple choice" if "choices" in row else "cloze")
            questions.append(_question(row, formats[-1]))
            if formats[-1] != formats[0]:
                raise JsonError(f"is {formats[-1]}, and line 1 is {formats[0]}: write one file for each format")
        except JsonError as error:
            raise UserError(f"{path}, line {number}: the row {error}") from None
    return Task(path.stem, path, formats[0], tuple(questions), hashlib.sha256(content).hexdigest()[:16])


def check_tasks(key: str, paths: Sequence[str]) -> list[Problem]:
    """Problems of the task files at `key`: each is read, and their names must differ."""
    problems = []
    names = [Path(path).stem for path in paths]
    for index, path in enumerate(paths):
        if names[index] in names[:index]:
            rule = f"files of different names: those of the tasks; {names[index]!r} is there twice"
            problems.append(Problem(key, path, rule, "rename one of the files"))
        try:
            read_task(path)
        except UserError as error:
            rule = "the path of a file of questions, one JSON object per line (docs/evaluation.md)"
            problems.append(Problem(key, path, rule, f"fix the file: {error}"))
    return problems


def encode_task(task: Task, tokenizer: Tokenizer, *, seq_len: int, add_bos: bool) -> EncodedTask:
    """Tokens of all rows, divided into context and choice as by lm_eval.

    A context starts with the special tokens that the tokenizer puts before a text, or with BOS if it puts none and
    `add_bos` is set. Whitespace at the end of a context belongs to the choice. The tokens of a choice are those of both
    texts together after as many as the context alone has. An empty context is BOS, or EOS without BOS. A conversation
    has only the special tokens of the chat template, and all that the template writes belongs to the context, as in
    training. Contexts lose their first tokens if a row has more than `seq_len` inputs. Raises UserError, which names
    the file and the line.
    """
    pairs = [(question.context, choice) for question in task.questions for choice in question.choices]
    plain = [(text, end) for text, end in pairs if isinstance(text, str)]
    chats = [(messages, end) for messages, end in pairs if not isinstance(messages, str)]
    try:
        texts = iter(list(_after_texts(plain, tokenizer, add_bos)))
    except UserError as error:
        raise UserError(f"{task.path}: {error}") from None
    try:
        encoded_chats = iter(ChatEncoder(tokenizer).continuations(chats) if chats else [])
    except UserError as error:
        raise UserError(f"{task.path} has questions with messages: {error}") from None
    rows: list[Scored] = []
    truncated = 0
    for number, question in enumerate(task.questions, start=1):
        for choice in question.choices:
            found = next(texts) if isinstance(question.context, str) else next(encoded_chats)
            if isinstance(found, BadRowError):
                raise UserError(f"{task.path}, line {number}: {found}")
            tokens, begin = found
            if fault := _fault_of(tokens, begin, question, choice, seq_len):
                raise UserError(f"{task.path}, line {number}: {fault}")
            cut = max(0, len(tokens) - seq_len - 1)
            rows.append(Scored(np.array(tokens[cut:], np.int64), begin - cut))
            truncated += cut > 0
    return EncodedTask(task, tuple(rows), truncated)


def _after_texts(
    pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer, add_bos: bool
) -> Iterator[tuple[list[int], int]]:
    """For each context and choice, the tokens of both, and how many of them are the context's."""
    prefix = tokenizer.prefix_ids or ((tokenizer.bos_id,) if add_bos and tokenizer.bos_id is not None else ())
    separators = [token_id for token_id in (tokenizer.bos_id, tokenizer.eos_id) if token_id is not None]
    start = separators[:1]  # in place of an empty context
    contexts = list(dict.fromkeys(context.rstrip() for context, _ in pairs))
    lengths = {text: len(ids) for text, ids in zip(contexts, tokenizer.encode_batch(contexts), strict=True)}
    texts = tokenizer.encode_batch([context + choice for context, choice in pairs])
    for (context, _), tokens in zip(pairs, texts, strict=True):
        if context:
            yield [*prefix, *tokens], len(prefix) + lengths[context.rstrip()]
        else:
            yield tokens if tokens[:1] == start else [*start, *tokens], len(start)


def _fault_of(tokens: Sized, begin: int, question: Question, choice: str, seq_len: int) -> str:
    """Why a row cannot be scored, or ""."""
    if not begin and not question.context:
        return "the context is empty, and the tokenizer has neither BOS nor EOS: write a text"
    if not begin:
        return "the context has no tokens: write a text, or leave it empty"
    if begin >= len(tokens):
        return f"{choice!r} has no tokens of its own after the context"
    if len(tokens) - begin > seq_len:
        excess = f"{len(tokens) - begin:,} tokens of a choice are more than training.seq_len = {seq_len:,}"
        return f"{excess}: shorten it, or raise this key"
    return ""


class _Cloze(BaseModel):
    """A row with the answer as a text. messages: checked by parse_conversation."""

    model_config = ConfigDict(strict=True)

    context: MaybeEmpty = ""
    messages: Any = None
    answer: Text


class _MultipleChoice(_Cloze):
    """A row with the answer as an index of its choices."""

    choices: Annotated[list[Text], Field(min_length=2)]
    answer: Annotated[int, Field(ge=0)]  # type: ignore[assignment]


def _question(row: dict[str, Any], form: TaskFormat) -> Question:
    """The question of a row, which may have other names, too. Raises JsonError."""
    if len(row.keys() & {"context", "messages"}) != 1:
        raise JsonError(f"has {'both' if 'context' in row else 'none of'} 'context' and 'messages': {FORMATS}")
    try:
        found = (_Cloze if form == "cloze" else _MultipleChoice).model_validate(row)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ", item ".join(map(repr, fault["loc"]))
        raise JsonError(f"has a fault at {place} ({fault['msg']}): {FORMATS}") from None
    context = _conversation(found.messages) if "messages" in row else found.context
    if not isinstance(found, _MultipleChoice):
        return Question(context, (found.answer,), 0)
    last = len(found.choices) - 1
    if found.answer > last:
        raise JsonError(f"has answer {found.answer} for {last + 1} choices: write an index from 0 to {last}")
    return Question(context, tuple(found.choices), found.answer)


def _conversation(given: Any) -> tuple[Message, ...]:
    """The turns before an answer. Raises JsonError."""
    try:
        messages = parse_conversation({"messages": given})
    except BadRowError as bad:
        raise JsonError(f"has messages that cannot be used: {bad}") from None
    if messages[-1]["role"] == ASSISTANT:
        raise JsonError("has messages that end with a turn of the assistant, whose turn is next: remove it")
    return tuple(messages)
