"""Conversations: JSON lines with the messages of one conversation each."""

import sys
from collections.abc import Iterator
from typing import IO, Any

from titanlite.data.chat.messages import ASSISTANT, Conversation, parse_row, require_answer
from titanlite.data.sources.config import CHAT, CONVERSATION_FIELDS
from titanlite.data.sources.jsonl import Jsonl, json_value, rows_fault
from titanlite.data.sources.pieces import BadRowError, ConversationError, KindError, Piece, utf8_text
from titanlite.data.sources.stored import SourceFile


class Chat(Jsonl):
    """A piece is a line, of any length: conversations are never cut. Its text is the JSON of the line."""

    kind = CHAT
    keys = ("loss_on", "too_long")

    def settings(self) -> dict[str, Any]:
        return {key: getattr(self.config, key) for key in self.keys}

    def scan(self, path: SourceFile, file: int, max_piece_bytes: int) -> Iterator[Piece]:  # noqa: ARG002
        return super().scan(path, file, sys.maxsize)

    def plain_text(self, text: str) -> str:
        """The contents of the messages, in lines."""
        contents = (message.get("content") for message in conversation(text.encode()).messages)
        text = "\n".join(content for content in contents if isinstance(content, str))
        return text and utf8_text(text.encode("utf-8", "surrogatepass"))

    def _text_of(self, line: bytes) -> bytes:
        return line

    def _fault_of_first_file(self, opened: IO[bytes]) -> BadRowError | None:
        fault = rows_fault(opened, self.files()[0].name, self._require_conversation)
        return ConversationError(str(fault)) if type(fault) is BadRowError else fault

    def _require_conversation(self, line: bytes) -> None:
        found = conversation(line)
        if self.config.loss_on == ASSISTANT:
            require_answer(found.messages)


def conversation(line: bytes, *, reads_fields: bool = True) -> Conversation:
    """The conversation in a line. reads_fields: see parse_row. Raises BadRowError."""
    row = json_value(line)
    if isinstance(row, dict) and isinstance(row.get("text"), str) and not row.keys() & {*CONVERSATION_FIELDS}:
        raise KindError(f"the row has the text of a document, and neither {' nor '.join(CONVERSATION_FIELDS)}", "jsonl")
    return parse_row(row, reads_fields=reads_fields)
