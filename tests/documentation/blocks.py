"""The fenced code blocks of the documentation, and the tags in their info strings."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [
    path.relative_to(REPOSITORY).as_posix()
    for path in (
        *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md")),
        *sorted((REPOSITORY / "docs").glob("*.md")),
        *sorted((REPOSITORY / "examples").rglob("*.md")),
    )
]
LANGUAGES = ("bash", "dockerfile", "python", "toml", "yaml")
TAGS = ("quick", "soak", "cluster", "syntax")

FENCE = re.compile(r"^( *)(`{3,})(.*)$")
PREPARATIONS = re.compile(r" *<!-- before: ([\w ]+) -->")
FILE = re.compile(r"# (\S+\.(?:py|sh|toml|yaml))")


@dataclass(frozen=True)
class Block:
    """A block. line: of its first fence, from 1. words: of the info string, after the language; "" if it has none.

    before: the preparations that the comment above the block names.
    """

    page: str
    line: int
    language: str
    words: tuple[str, ...]
    text: str
    before: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join([f"{self.page}:{self.line}", self.language, *self.words])

    @property
    def tag(self) -> str:
        """The first word after the language, or ""."""
        return self.words[0] if self.words else ""

    @property
    def file(self) -> str:
        """The file that the block is, by a comment in its first line, such as `# my.toml`; or ""."""
        found = FILE.fullmatch(self.text.partition("\n")[0])
        return found[1] if found else ""

    @property
    def is_program(self) -> bool:
        """Whether a reader runs the block, in place of saving it."""
        return self.language in ("bash", "python") and not self.file


def blocks_of(page: str, text: str) -> Iterator[Block]:
    """Yield the blocks of a page, in order."""
    lines = text.split("\n")
    number = 0
    before: tuple[str, ...] = ()
    while number < len(lines):
        if lines[number].strip():  # blank lines may separate a comment and its block
            found = PREPARATIONS.fullmatch(lines[number])
            named = tuple(found[1].split()) if found else ()
            fence = FENCE.match(lines[number])
            if fence:
                indent, ticks, info = fence.groups()
                end = number + 1
                while end < len(lines) and not re.fullmatch(rf" *{ticks}`* *", lines[end]):
                    end += 1
                language, *words = info.split() or [""]
                inside = [line.removeprefix(indent) for line in lines[number + 1 : end]]
                yield Block(page, number + 1, language, tuple(words), "\n".join(inside) + "\n", before)
                number = end
            before = named
        number += 1


def read_page(page: str) -> list[Block]:
    """The blocks of a page of the repository."""
    return list(blocks_of(page, (REPOSITORY / page).read_text("utf-8")))


def tag_problem(block: Block) -> str:
    """What to change in the info string of a block, or ""."""
    if not block.language:
        return ""
    if block.language not in LANGUAGES:
        return f"{block}: must be one of {', '.join(LANGUAGES)}; leave the language out for text and output"
    if len(block.words) != 1 or block.tag not in TAGS:
        return f"{block}: write ```{block.language} and one of {', '.join(TAGS)} (see CONTRIBUTING.md)"
    return ""
