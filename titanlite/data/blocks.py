"""Blocks: consecutive rows of a file that are kept in memory and permuted, where there is no index to permute."""

from collections.abc import Iterator
from typing import NamedTuple

from titanlite.data.pieces import BadRowError, cut, flags_of, utf8_text
from titanlite.data.rows import Row, Unit
from titanlite.runtime.errors import UserError

MAX_BLOCK_ROWS = 1024
MAX_BLOCK_BYTES = 4 * 2**20
"""A block ends with the row that brings it to either: so much of each stream is in memory."""

_UNIT_BITS, _ROW_BITS, _PIECE_BITS = 17, 29, 17

MAX_ROW_PIECES = 2 ** (_PIECE_BITS - 1)
"""A row of more pieces is a bad one, and a block with this many pieces ends."""


class Position(NamedTuple):
    """Where a piece is. unit: which file or row group. row: from which row on. piece: which piece from there."""

    unit: int
    row: int
    piece: int

    def packed(self) -> int:
        """As one integer below 2^63. Raises UserError where there are too many files or rows for that."""
        if self.unit >= 2**_UNIT_BITS or self.row >= 2**_ROW_BITS:
            raise UserError(
                f"streaming goes up to {2**_UNIT_BITS:,} files or row groups, and {2**_ROW_BITS:,} rows of a file; for "
                "more, set streaming = false in the source"
            )
        return (self.unit << _ROW_BITS | self.row) << _PIECE_BITS | self.piece

    @classmethod
    def of(cls, packed: int) -> "Position":
        """What was packed."""
        rest, piece = divmod(packed, 2**_PIECE_BITS)
        unit, row = divmod(rest, 2**_ROW_BITS)
        return cls(unit, row, piece)


class Part(NamedTuple):
    """A piece: a part of a row's text, which is the number-th of them. row: index in the block."""

    row: int
    number: int
    begin: int
    end: int
    flags: int


class Block(NamedTuple):
    """rows: consecutive ones of a unit, as far as they are the stream's. parts: their pieces, as they are consumed."""

    unit: Unit
    rows: list[Row]
    parts: list[Part]

    def read(self, piece: int) -> str | BadRowError:
        """The text of a piece, or what is to be raised by whoever consumes it."""
        part = self.parts[piece]
        row, text = self.rows[part.row]
        try:
            if isinstance(text, BadRowError):
                raise text
            return utf8_text(text[part.begin : part.end])
        except BadRowError as bad:
            return BadRowError(f"{self.unit.file}, {self.unit.row_name} {row}: {bad}")


def take_block(unit: Unit, rows: Iterator[Row], max_piece_bytes: int) -> Block:
    """As many of the next rows as fill a block, their pieces in order; none where there are none."""
    taken: list[Row] = []
    parts: list[Part] = []
    num_bytes = 0
    for row in rows:
        cuts = _cuts(row, max_piece_bytes)
        if len(cuts) > MAX_ROW_PIECES:
            bad = (
                f"the text is {len(cuts):,} pieces of data.max_piece_bytes, and at most {MAX_ROW_PIECES:,} are possible"
            )
            row, cuts = row._replace(text=BadRowError(bad)), [(0, 0)]
        size = cuts[-1][1]
        for number, (begin, end) in enumerate(cuts):
            parts.append(Part(len(taken), number, begin, end, flags_of(begin, end, 0, size)))
        taken.append(row)
        num_bytes += size
        if len(taken) >= MAX_BLOCK_ROWS or num_bytes >= MAX_BLOCK_BYTES or len(parts) >= MAX_ROW_PIECES:
            break
    return Block(unit, taken, parts)


def _cuts(row: Row, max_piece_bytes: int) -> list[tuple[int, int]]:
    """At least one (begin, end), also for a bad row and for no text."""
    if isinstance(row.text, BadRowError) or not row.text:
        return [(0, 0)]
    return list(cut(row.text, 0, len(row.text), max_piece_bytes))
