"""Conversations with a model: its answers, and the dialog on stdin and stdout."""

import contextlib
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from titanlite.data.chat.encoder import ChatEncoder
from titanlite.data.chat.messages import Message
from titanlite.data.tokenizer import Tokenizer
from titanlite.generation.generate import Sampling, TextStream, Transcript
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log
from titanlite.runtime.text import for_stdout, visible

DEFAULT_CHAT_TOKENS = 1024
CONTINUED = "\\"
"""Ends a line of a message that continues in the next line."""
HELP = f"""\
/reset     begin a new conversation
/help      print this text
Ctrl-C     stop the answer; at the prompt: end
Ctrl-D     end
A line that ends with {CONTINUED} continues in the next line. An empty line does nothing.
An option of the command: --system TEXT, for instructions that hold for the entire conversation."""


class ConversationTooLongError(UserError):
    """A conversation leaves no position for an answer. fact: without a remedy."""

    def __init__(self, num_tokens: int, max_seq_len: int) -> None:
        self.fact = (
            f"the conversation has {num_tokens:,} tokens, which leaves no room for an answer: the model has "
            f"{max_seq_len:,} positions (model.max_seq_len)"
        )
        super().__init__(f"{self.fact}; shorten the messages, or leave earlier ones out")


@dataclass
class Answer:
    """The answer to a conversation, while it is iterated over. pieces: its text, to be read once.

    text: read so far. limit: what has ended it, if not the end of the turn: --max-new-tokens, or the model's positions.
    """

    pieces: Iterator[str]
    text: str = ""
    limit: Literal["tokens", "positions"] | None = None

    def __iter__(self) -> Iterator[str]:
        for piece in self.pieces:
            self.text += piece
            yield piece


@dataclass
class ChatModel:
    """A model that answers conversations, and what it needs for that.

    transcript: of the conversations so far. eos_ids: tokens that end an answer. max_new_tokens: of an answer.
    max_seq_len: positions of the model. trained_seq_len: of the sequences that it was trained on.
    """

    transcript: Transcript
    tokenizer: Tokenizer
    encoder: ChatEncoder
    sampling: Sampling
    eos_ids: Collection[int]
    max_new_tokens: int
    max_seq_len: int
    trained_seq_len: int
    _has_warned: bool = field(default=False, init=False)

    def answer(self, messages: Sequence[Message]) -> Answer:
        """The answer to a conversation, without special tokens. The draws depend on the number of earlier answers.

        Raises ConversationTooLongError, and UserError if the template refuses the conversation.
        """
        prompt = self.encoder.prompt(messages)
        room = self.max_seq_len - len(prompt)
        if room < 1:
            raise ConversationTooLongError(len(prompt), self.max_seq_len)
        if len(prompt) > self.trained_seq_len and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the run was trained on sequences of %d tokens: longer ones are extrapolated", self.trained_seq_len
            )
        earlier = sum(message["role"] == "assistant" for message in messages)
        answer = Answer(iter(()))
        answer.pieces = self._pieces(answer, prompt, min(self.max_new_tokens, room), earlier)
        return answer

    def _pieces(self, answer: Answer, prompt: Sequence[int], max_new_tokens: int, earlier: int) -> Iterator[str]:
        sampling = replace(self.sampling, seed=(self.sampling.seed + earlier) % 2**63)
        stream = TextStream(self.tokenizer, prompt)
        tokens = self.transcript.answer(prompt, sampling, max_new_tokens=max_new_tokens, eos_ids=self.eos_ids)
        answer.limit = "tokens" if max_new_tokens == self.max_new_tokens else "positions"
        for token in tokens:
            if token in self.eos_ids:
                answer.limit = None
            elif not self.tokenizer.is_special(token):
                yield stream.add(token)
        yield stream.rest()


class Dialog:
    """A conversation whose answers are written to stdout as they are generated. system: instructions, or ""."""

    def __init__(self, model: ChatModel, system: str) -> None:
        self._model = model
        self._system = system
        self.messages: list[Message] = []
        self.reset()

    def reset(self) -> None:
        """Begin a new conversation."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def ask(self, text: str) -> None:
        """Write the answer to `text`, and a newline. Message and answer become part of the conversation.

        Also after an interrupt, with the part of the answer that was written, unless it is empty. Raises
        ConversationTooLongError, or UserError if the template refuses the message, with an unchanged conversation.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = self._model.answer(asked)
        is_complete = False
        try:
            for piece in answer:
                sys.stdout.write(for_stdout(piece))
                sys.stdout.flush()
            is_complete = True
        finally:
            if is_complete or answer.text:
                self.messages = [*asked, {"role": "assistant", "content": answer.text}]
            sys.stdout.write("\n")
            sys.stdout.flush()
        if answer.limit == "tokens":
            note(f"the answer was cut after --max-new-tokens = {self._model.max_new_tokens:,}")
        elif answer.limit == "positions":
            note(f"the answer was cut at the model's last position, {self._model.max_seq_len:,}")


def answer_all(dialog: Dialog, texts: Iterable[str]) -> None:
    """Answer the texts one after the other."""
    for text in texts:
        dialog.ask(text)


def converse(dialog: Dialog) -> None:
    """Answer the lines of stdin until its end. On a terminal, Ctrl-C stops an answer only; see HELP."""
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        note("type a message, or /help; Ctrl-D ends")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() then edits lines and remembers them)
    while (text := read_message()) is not None:
        command = text.strip()
        if command == "/help":
            print(HELP, file=sys.stderr)
        elif command == "/reset":
            dialog.reset()
            note("a new conversation begins")
        elif on_terminal and re.fullmatch(r"/\w+", command):
            note(f"{command} is no command; /help lists them")
        elif command:
            try:
                dialog.ask(text)
            except KeyboardInterrupt:
                if not on_terminal:
                    raise
                note("stopped; Ctrl-C again ends")
            except ConversationTooLongError as error:
                if not on_terminal:
                    raise
                note(f"{error.fact}; type /reset to begin a new one, or write a shorter message")
            except UserError as error:
                if not on_terminal:
                    raise
                note(str(error))
    if on_terminal:
        print(file=sys.stderr)


def read_message() -> str | None:
    """The next message of stdin, of one line or of several that end with CONTINUED; None at the end."""
    lines: list[str] = []
    while (line := _read_line("... " if lines else "> ")) is not None:
        lines.append(line.removesuffix(CONTINUED))
        if not line.endswith(CONTINUED):
            break
    return "\n".join(lines) if lines else None


def _read_line(prompt: str) -> str | None:
    """The next line of stdin, None at its end. prompt: is written if stdin is a terminal, but never to a stdout that is
    not."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        try:
            return input(prompt)
        except EOFError:
            return None
    if sys.stdin.isatty():
        print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.removesuffix("\n") if line else None


def note(text: str) -> None:
    """Write a remark of the program to stderr."""
    print(f"[{visible(text)}]", file=sys.stderr, flush=True)
