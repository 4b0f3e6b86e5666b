"""The messages that docs/troubleshooting.md quotes are in the program."""

import ast
import re
from collections.abc import Iterator

from tests.documentation.blocks import REPOSITORY

GAP = "…"
PLACEHOLDER = re.compile(r"%[-\d.]*[sdgrf]")


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Yield the texts of a module, with GAP in place of the values that they format."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield PLACEHOLDER.sub(GAP, node.value)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else GAP for part in node.values)


def quoted_messages(page: str) -> list[str]:
    """The messages: the code that fills a cell of the first column of the tables."""
    return re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)


def absent_messages(messages: list[str]) -> list[str]:
    """The messages whose constant parts are not all, in this order, in one text of the program."""
    files = (REPOSITORY / "titanlite").rglob("*.py")
    texts = {text for file in files for text in texts_of(ast.parse(file.read_text("utf-8")))}
    absent = []
    for message in messages:
        parts = list(filter(None, message.split(GAP)))
        pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
        longest = max(parts, key=len)
        if not any(longest in text and pattern.search(text) for text in texts):
            absent.append(message)
    return absent


def test_quoted_messages_exist() -> None:
    messages = quoted_messages((REPOSITORY / "docs/troubleshooting.md").read_text("utf-8"))
    wrong = ["the model does not fit at all: …", "rank … is short of memory …: …", "…, retrying in … s: cannot read …"]
    assert len(messages) > 50
    assert absent_messages([*messages, *wrong]) == wrong
