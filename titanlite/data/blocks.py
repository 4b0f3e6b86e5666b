"""Order of streamed sources, such as a dataset of the hub, which have no index: files are read block by block.

A unit is a file, or a row group of a Parquet file if there are fewer files than streams. A block is consecutive rows of
a unit, kept in memory and permuted. Each epoch has an order of the units. In the concatenated orders of all epochs,
stream s of S reads the units s, s + S, s + 2S, … If there are also fewer row groups than streams, units are files, and
gcd(units, S) groups of streams read units in this way; the streams of a group share each unit by row numbers. Each row
therefore belongs to exactly one stream in each epoch.
"""

import math
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from titanlite.data.order import MIN_PATIENCE, READ_AHEAD_PIECES, shuffled
from titanlite.data.sources.base import MAX_BLOCK_BYTES, MAX_BLOCK_ROWS, ReadUnit, Row, Share, StreamedSource
from titanlite.data.sources.pieces import (
    BYTES_PER_TOKEN,
    CONTEXT,
    EMPTY_PIECE,
    BadRowError,
    PieceEncoder,
    PieceText,
    Place,
    TokenPiece,
    cut,
    utf8_text,
)
from titanlite.runtime.errors import UserError
from titanlite.runtime.retry import reason, retrying

_UNIT_BITS, _ROW_BITS, _PIECE_BITS = 17, 29, 17

MAX_ROW_PIECES = 2 ** (_PIECE_BITS - 1)
"""Maximum pieces of a row, otherwise the row is bad. A block ends when it has this many pieces."""


class Position(NamedTuple):
    """Position of a piece. unit: file or row group. row: first row of the block. piece: piece of the block."""

    unit: int
    row: int
    piece: int

    def packed(self) -> int:
        """Pack into one integer below 2^63. Raises UserError if there are too many files or rows."""
        if self.unit >= 2**_UNIT_BITS or self.row >= 2**_ROW_BITS:
            raise UserError(
                f"row {self.row:,} of file or row group {self.unit + 1:,}: streaming supports up to "
                f"{2**_UNIT_BITS:,} files or row groups, and {2**_ROW_BITS:,} rows per file; for more, set streaming = "
                "false in the source"
            )
        return (self.unit << _ROW_BITS | self.row) << _PIECE_BITS | self.piece

    @classmethod
    def of(cls, packed: int) -> "Position":
        """Unpack a packed position."""
        rest, piece = divmod(packed, 2**_PIECE_BITS)
        unit, row = divmod(rest, 2**_ROW_BITS)
        return cls(unit, row, piece)


class RowPart(NamedTuple):
    """A piece: bytes [begin, end) of a row's text. row: index in the block. number: which part of the row."""

    row: int
    number: int
    begin: int
    end: int
    flags: int


class Block(NamedTuple):
    """rows: consecutive rows of a unit that belong to the stream. parts: their pieces, in the order of consumption."""

    unit: ReadUnit
    rows: list[Row]
    parts: list[RowPart]

    def read(self, piece: int) -> str | BadRowError:
        """The text of a piece, or the BadRowError for its consumer to raise."""
        part = self.parts[piece]
        _, text = self.rows[part.row]
        try:
            if isinstance(text, BadRowError):
                raise text
            return utf8_text(text[part.begin : part.end])
        except BadRowError as bad:
            return BadRowError(f"{self.locate(piece)}: {bad}")

    def with_context(self, piece: int, num_characters: int) -> PieceText:
        """A piece to tokenize, with up to num_characters of its row on both sides."""
        part, text = self.parts[piece], self.read(piece)
        row = self.rows[part.row].text
        document = partial(self._document, part.row)
        if isinstance(text, Exception) or isinstance(row, BadRowError):
            return PieceText(part.flags, text, document)
        num_bytes = 4 * num_characters
        before = row[max(0, part.begin - num_bytes) : part.begin].decode("utf-8", "ignore")
        after = row[part.end : part.end + num_bytes].decode("utf-8", "ignore")
        return PieceText(
            part.flags, text, document, before[max(0, len(before) - num_characters) :], after[:num_characters]
        )

    def _document(self, row: int) -> Iterator[str | BadRowError]:
        """The text of all pieces of a row, in any order."""
        return (self.read(n) for n, part in enumerate(self.parts) if part.row == row)

    def locate(self, piece: int) -> str:
        """File and row of a piece, for messages."""
        return f"{self.unit.file}, {self.unit.row_name} {self.rows[self.parts[piece].row].number}"


def take_block(unit: ReadUnit, rows: Iterator[Row], max_piece_bytes: int) -> Block:
    """Read the next rows until they fill a block; its pieces are in order. The block is empty if no rows are left."""
    taken: list[Row] = []
    parts: list[RowPart] = []
    num_bytes = 0
    for row in rows:
        text = b"" if isinstance(row.text, BadRowError) else row.text
        cuts = list(cut(text, 0, len(text), max_piece_bytes))
        if len(cuts) > MAX_ROW_PIECES:
            bad = f"the text has {len(cuts):,} pieces of data.max_piece_bytes; at most {MAX_ROW_PIECES:,} are supported"
            row, cuts = row._replace(text=BadRowError(bad)), []
        # A bad row or an empty text is one piece: reading it gives the error.
        parts += [RowPart(len(taken), number, *part) for number, part in enumerate(cuts or [(0, 0, 0)])]
        taken.append(row)
        num_bytes += parts[-1].end
        if len(taken) >= MAX_BLOCK_ROWS or num_bytes >= MAX_BLOCK_BYTES or len(parts) >= MAX_ROW_PIECES:
            break
    return Block(unit, taken, parts)


class Division:
    """The units of a source, and their assignment to `num_streams` streams. Raises UserError.

    seeds: seeds of the order of the units; (): the order of the files. description: number of units, and the cost of
    sharing them.
    """

    def __init__(self, source: StreamedSource, num_streams: int, seeds: tuple[int, ...]) -> None:
        files = source.data_files()
        self.source = source
        self.seeds = seeds
        self.file_numbers = {file: n for n, file in enumerate(files)}
        self.units = [ReadUnit(file) for file in files]
        if len(self.units) < num_streams:
            row_groups = source.row_groups()
            self.units = row_groups if len(row_groups) >= num_streams else self.units
        if len(self.units) > 2**_UNIT_BITS:
            raise UserError(
                f"{source.name} has {len(self.units):,} files or row groups, and streaming supports up to "
                f"{2**_UNIT_BITS:,}; set streaming = false in this source"
            )
        enough = len(self.units) >= num_streams
        self.groups = num_streams if enough else math.gcd(len(self.units), num_streams)
        self.sharers = num_streams // self.groups
        _allow_open_files()
        self.description = self._describe(num_streams)

    def _describe(self, num_streams: int) -> str:
        what = f"row groups of {len(self.file_numbers):,} files" if self.units[0].group >= 0 else "files"
        start = f"{self.source.name}{self.source.origin}: {len(self.units):,} {what}, streamed"
        if self.sharers == 1:
            return f"{start}, each read by one stream"
        return (
            f"{start}; too few for {num_streams} streams: {self.sharers} streams read each one and keep one row in "
            f"{self.sharers}, so the data is read {self.sharers} times (streaming = false reads it once)"
        )

    def number(self, block: Block, piece: int) -> int:
        """Ledger number of a piece of a block, the same in every epoch and for every number of streams."""
        part = block.parts[piece]
        return Position(self.file_numbers[block.unit.file], block.rows[part.row].number, part.number).packed()

    def locate(self, number: int) -> str:
        """File and row of a piece, by its ledger number, for messages."""
        file, row, _ = Position.of(number)
        unit = ReadUnit(list(self.file_numbers)[file])
        return f"{unit.file}, {unit.row_name} {row}"

    def order(self, epoch: int) -> list[ReadUnit]:
        """All units in their order of an epoch."""
        if not self.seeds:
            return self.units
        return [self.units[n] for n in shuffled(len(self.units), *self.seeds, epoch)]

    def share(self, stream: int, epoch: int) -> Share:
        """The rows that a stream keeps of its units; they differ by epoch, as there may be fewer rows than streams."""
        return Share((stream // self.groups + epoch) % self.sharers, self.sharers)


def _allow_open_files() -> None:
    """Raise the limit of open files to its maximum: each stream keeps one file open, and the usual limit is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems reject their own maximum
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class _Start(NamedTuple):
    """The start of a block: epoch, index of the unit in the epoch's order, and row number."""

    epoch: int
    unit: int
    row: int


class BlockPieces:
    """StreamPieces of one stream. Keeps one block in memory, and its file open for the next block.

    Place.position is a packed Position: index of the unit in the epoch's order, first row and piece of the block.

    Returning to an earlier block decodes its row group (Parquet) or reads its file (JSON lines) from the beginning.
    Retries reads that fail with a transient error, and raises UserError after the last try.
    """

    windows = False

    def __init__(self, division: Division, stream: int, *, encoder: PieceEncoder, max_piece_bytes: int) -> None:
        self.name = division.source.name
        self.patience = sys.maxsize  # the number of pieces is unknown until the end of the first full epoch
        self._division = division
        self._stream = stream
        self._encoder = encoder
        self._max_piece_bytes = max_piece_bytes
        self._epochs = division.source.config.epochs
        self._order: tuple[int, list[ReadUnit]] = (-1, [])
        self._block: tuple[_Start, Block] | None = None
        self._rows: tuple[_Start, Iterator[Row]] | None = None
        self._walked: int | None = None
        self._after: tuple[Place, Place] | None = None
        self._fetched: dict[Place, TokenPiece | Exception] = {}
        self._numbers: dict[Place, int] = {}

    def first(self) -> Place:
        """The start of the first unit, which may have no piece: nothing is read."""
        return self._start_of_unit(self._stream % self._division.groups)

    def after(self, place: Place) -> Place:
        """The place of the next piece; skips empty units, up to the first unit of the next epoch."""
        if self._after is None or self._after[0] != place:  # a second lookup would reload the earlier block
            self._after = (place, self._following(place))
            self._count(place, self._after[1])
        return self._after[1]

    def _following(self, place: Place) -> Place:
        unit, _, piece = Position.of(place.position)
        block = self._block_at(place)
        if piece + 1 < len(block.parts):
            return Place(place.epoch, place.position + 1)
        if block.rows:
            following = Place(place.epoch, Position(unit, block.rows[-1].number + 1, 0).packed())
            if self._block_at(following).rows:
                return following
        following = self._next_unit(place)
        while following.epoch == place.epoch and not self._block_at(following).rows:
            following = self._next_unit(following)
        return following

    def _start_of_unit(self, number: int) -> Place:
        """The start of unit `number` of the concatenated orders of all epochs."""
        epoch, unit = divmod(number, len(self._division.units))
        return Place(epoch, Position(unit, 1, 0).packed())

    def _unit_number(self, place: Place) -> int:
        """The reverse of _start_of_unit, of any place in the unit."""
        return place.epoch * len(self._division.units) + Position.of(place.position).unit

    def _next_unit(self, place: Place) -> Place:
        """The start of the stream's next unit after the unit at `place`."""
        return self._start_of_unit(self._unit_number(place) + self._division.groups)

    def _count(self, place: Place, following: Place) -> None:
        """Set `patience` to two epochs of pieces after each full epoch."""
        if following.epoch == place.epoch:
            self._walked = None if self._walked is None else self._walked + 1
            return
        if self._walked is not None:
            self.patience = max(MIN_PATIENCE, 2 * (self._walked + 1))
        self._walked = 0

    def has_ended(self, place: Place) -> bool:
        return place.epoch >= self._epochs > 0

    def has(self, place: Place) -> bool:
        is_own = (self._unit_number(place) - self._stream) % self._division.groups == 0
        return is_own and Position.of(place.position).unit < len(self._division.units)

    def epochs(self, place: Place) -> float:
        """The part of the source in the units before that of `place`. Streams that share a unit have a part of it."""
        division = self._division
        passed = (self._unit_number(place) - self._stream % division.groups) // division.groups
        return passed / (division.sharers * len(division.units))

    def number(self, place: Place) -> int:
        """Ledger number of the piece: file, row, part of the row, packed."""
        return self._numbers[place]

    def fetch(self, place: Place, num_tokens: int) -> TokenPiece | Exception:
        if place not in self._fetched:
            self._fetched = self._tokenize_ahead(place, num_tokens)
        return self._fetched.pop(place)

    def _tokenize_ahead(self, place: Place, num_tokens: int) -> dict[Place, TokenPiece | Exception]:
        """Tokenize the piece at `place` and up to READ_AHEAD_PIECES of its block in one batch."""
        block, first = self._block_at(place), Position.of(place.position).piece
        if first >= max(1, len(block.parts)):
            what = f"{self.name} has no piece {first} in {block.unit.file} {tuple(Position.of(place.position))}"
            remedy = "use the data and data.max_piece_bytes of the run that is resumed"
            return {place: UserError(f"{what}: {remedy}")}
        end, num_bytes = first, 0
        while end < min(len(block.parts), first + READ_AHEAD_PIECES) and num_bytes < BYTES_PER_TOKEN * num_tokens:
            num_bytes += block.parts[end].end - block.parts[end].begin
            end += 1
        ahead = range(first, end)
        places = [Place(place.epoch, place.position + piece - first) for piece in ahead]
        context = CONTEXT if self._encoder.reads_context else 0
        read = [block.with_context(piece, context) for piece in ahead]
        tokens = self._encoder.encode(read, lambda n: block.locate(ahead[n]))
        self._numbers = {place: self._division.number(block, piece) for place, piece in zip(places, ahead, strict=True)}
        if not ahead:  # the first unit of the stream has no row for it
            return {place: EMPTY_PIECE}
        return dict(zip(places, tokens, strict=True))

    def _block_at(self, place: Place) -> Block:
        """The block at `place`, its pieces in the order of consumption; empty after the end of a unit."""
        unit, row, _ = Position.of(place.position)
        start = _Start(place.epoch, unit, row)
        if self._block is None or self._block[0] != start:
            self._block = None
            what = f"{self._units(place.epoch)[unit].file} of the source {self.name!r}"
            try:
                self._block = (start, retrying(what, lambda: self._take(start)))
            except OSError as error:
                raise UserError(f"{what} can no longer be read: {reason(error)}") from error
        return self._block[1]

    def _take(self, start: _Start) -> Block:
        """Read a block: from the open file if it follows the previous block, otherwise open the file again."""
        unit = self._units(start.epoch)[start.unit]
        share = self._division.share(self._stream, start.epoch)
        follows = self._rows is not None and self._rows[0] == start
        rows = self._rows[1] if follows and self._rows else self._division.source.rows(unit, start.row, share)
        self._rows = None  # an iterator that raised is exhausted
        block = take_block(unit, rows, self._max_piece_bytes)
        if block.rows:
            self._rows = (start._replace(row=block.rows[-1].number + 1), rows)
        if not self._division.seeds:
            return block
        order = shuffled(len(block.parts), *self._division.seeds, start.epoch, self._stream, start.unit, start.row)
        return block._replace(parts=[block.parts[n] for n in order])

    def _units(self, epoch: int) -> list[ReadUnit]:
        if self._order[0] != epoch:
            self._order = (epoch, self._division.order(epoch))
        return self._order[1]
