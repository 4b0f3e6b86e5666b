"""A kind of source: the cells of Jupyter notebooks, one document per cell.

Use it with

    [job]
    plugins = ["source.py"]
    [[data.sources]]
    kind = "notebooks"
    path = "my_notebooks"
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import titanlite
from titanlite.data.sources.base import TextSource
from titanlite.data.sources.pieces import BAD_FILE, BadRowError, Piece


class Notebooks(TextSource):
    """A piece is a cell, or a part of a long one: `row` is its number in the notebook, from 1.

    `scan` runs once per file and is cached in an index; `read` runs whenever a stream needs the piece. Order, tokens,
    packing, resume, data workers and the ledger follow from these two.
    """

    kind = "notebooks"
    suffixes = (".ipynb",)
    row_name = "cell"

    def scan(self, path: Path, file: int, max_piece_bytes: int) -> Iterator[Piece]:
        try:
            texts = cells(path)
        except BadRowError:
            texts = []
        for row, text in enumerate(texts, 1):
            yield from Piece(file, row, 0, 0).parts(text.encode(), max_piece_bytes)
        if not any(texts):
            yield Piece(file, 1, 0, 0, flags=BAD_FILE)

    def read(self, path: Path, piece: Piece) -> str:
        texts = cells(path)
        if piece.flags & BAD_FILE:
            raise BadRowError("the notebook has no text")
        return texts[piece.row - 1].encode()[piece.begin :][: piece.length].decode()


def cells(path: Path) -> list[str]:
    """The text of each cell of a notebook. Raises BadRowError, which data.on_bad_row handles."""
    try:
        content: Any = json.loads(path.read_bytes())
        return ["".join(cell["source"]) for cell in content["cells"]]
    except (ValueError, KeyError, TypeError) as error:
        raise BadRowError(f"not a notebook: {error!r}") from None


titanlite.register_source(Notebooks)
