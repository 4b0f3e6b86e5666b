"""Text of messages and tables."""

import re
import sys
import unicodedata
from collections.abc import Sequence

_INVISIBLE = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f"  # control characters: C0, DEL, C1
    "\\u2028\\u2029"  # line ends that only some programs know
    "\\u202a-\\u202e\\u2066-\\u206f"  # direction: overrides, embeddings, isolates
    "\\ud800-\\udfff"  # halves of pairs: bytes of a file name that are not UTF-8
    "\\ufff9-\\ufffb\\U000e0000-\\U000e0fff]"  # annotations and tags, which no font shows
)
"""What a text of a stranger could use to control a terminal, or to look like another text. Marks of direction (U+200E,
U+200F, U+061C) and joiners are not in it: Arabic, Hebrew and Indic texts need them, and they move no other text."""


def visible(text: str, keep: str = "") -> str:
    """The text with characters that control a terminal, a line or the direction of writing as \\x1b, \\n, \\u202e.

    keep: those that remain, such as the line ends of a text of several lines. Other texts are returned unchanged, so a
    second call changes nothing.
    """
    if _INVISIBLE.search(text) is None:
        return text
    return _INVISIBLE.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


def visible_lines(text: str) -> str:
    """`visible` of a text of several lines, which may have tabs."""
    return visible(text, "\n\t")


def for_stdout(text: str) -> str:
    """The exact text; `visible_lines` of it if stdout is a terminal, so that a model or a file cannot control it."""
    return visible_lines(text) if sys.stdout.isatty() else text


_USERINFO = re.compile(r"(?<=://)(?!arn:)(?=[^/@\s]*[:@])\S*@")
"""What stands before the host or bucket of a URL: a user name, and a password, which may have "/" and "@". An Amazon
resource name in place of a bucket has colons, too."""


def without_userinfo(text: str) -> str:
    """The text with *** in place of user names and passwords in URLs; unchanged if it has none."""
    return _USERINFO.sub("***@", text)


def counted(count: int, noun: str) -> str:
    """A number and its noun: 1 file, 2,000 files, 3 meshes, 4 processes."""
    plural = f"{noun}es" if noun.endswith(("ch", "sh", "ss")) else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def ascii_form(character: str) -> str:
    """What to type in place of a character that looks like ASCII, or is invisible, as programs for documents write
    them: "-" for a dash, "" for a byte order mark. Other characters are unchanged."""
    if character.isascii():
        return character
    name, category = unicodedata.name(character, ""), unicodedata.category(character)
    if "QUOTATION MARK" in name:
        return "'" if "SINGLE" in name else '"'
    if name == "MINUS SIGN":
        return "-"
    form = unicodedata.normalize("NFKC", character)
    form = {"Cf": "", "Pd": "-", "Zs": " ", "Zl": " ", "Zp": " "}.get(category, form)
    return form if form.isascii() else character


def duration(seconds: float) -> str:
    """Seconds in the two largest units: 42s, 3m 07s, 5h 02m, 2d 03h."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h:02}h"
    if hours:
        return f"{h}h {m:02}m"
    return f"{m}m {s:02}s" if minutes else f"{s}s"


def one_line(error: BaseException) -> str:
    """The error on one line, with its type unless it is one of the file system."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def aligned(rows: Sequence[Sequence[str]], *, left: int = 0) -> list[str]:
    """The lines of a table of `visible` cells: the first `left` columns aligned to the left, the others to the
    right."""
    rows = [[*map(visible, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def is_visible(text: str) -> bool:
    """Whether a text has a character that is no space ("▁" is one), accent or other mark, or control character."""
    kinds = ((each, unicodedata.category(each)) for each in text)
    return any(kind[0] not in "ZM" and kind not in ("Cc", "Cf") and each != "▁" for each, kind in kinds)
