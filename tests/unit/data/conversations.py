"""Files of conversations."""

import json
from collections.abc import Sequence
from pathlib import Path

TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '.' }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""A chat template without special tokens."""


def write_conversations(file: Path, words: Sequence[int]) -> None:
    """Write a conversation for each number of words of its answer; every second one has two answers."""
    lines = []
    for number, count in enumerate(words):
        turns = [("user", f"question {number}"), ("assistant", "word " * count)]
        turns += [("user", "again"), ("assistant", "word ")] if number % 2 else []
        lines.append(json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]}))
    file.write_text("\n".join(lines) + "\n")
