"""Pieces as tokens: all sources of a run behind one numbering."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from titanlite.data.index import PieceIndex, open_index, reader_of
from titanlite.data.pieces import ENDS_DOCUMENT, STARTS_DOCUMENT, BadRowError, Piece
from titanlite.data.sources import SourceConfig, source_name
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import UserError

Tokens = npt.NDArray[np.int64]

BYTES_PER_TOKEN = 3
"""About as many as English and code have; it decides only how far text is read ahead."""


class Corpus(Protocol):
    """Numbered pieces, 0 to sum(counts) - 1, one source after the other.

    counts: pieces of each source. packed: whether pieces are joined to sequences; else each piece is one sequence.
    description: what there is, in one line.
    """

    counts: tuple[int, ...]
    packed: bool
    description: str

    def ahead(self, pieces: Sequence[int], num_tokens: int) -> int:
        """How many of the next `pieces` (at least 1) are worth fetching at once for about `num_tokens` tokens."""
        ...

    def fetch(self, pieces: Sequence[int]) -> list[Tokens | Exception]:
        """For each piece its tokens, or what is to be raised by whoever consumes it: BadRowError, UserError."""
        ...


class Texts:
    """The pieces of sources of text, as text. counts, description: as of a Corpus."""

    def __init__(self, sources: Sequence[SourceConfig], max_piece_bytes: int) -> None:
        self._sources = [(source_name(source), open_index(source, max_piece_bytes)) for source in sources]
        self._readers = [reader_of(source) for source in sources]
        self.counts = tuple(len(index) for _, index in self._sources)
        self._ends = list(accumulate(self.counts))
        self.description = "; ".join(_describe(name, index) for name, index in self._sources)

    def row(self, piece: int) -> Piece:
        """Where the piece lies in its source."""
        source, place = self._place(piece)
        return self._sources[source][1][place]

    def num_bytes(self, piece: int) -> int:
        """About the size of its text: for a whole row of JSON that of the row."""
        row = self.row(piece)
        return row.size if row.length < 0 else row.length

    def read(self, piece: int) -> str | Exception:
        """Its text, or what is to be raised by whoever consumes it: BadRowError, UserError."""
        source, place = self._place(piece)
        name, index = self._sources[source]
        row = index[place]
        path = index.files[row.file]
        try:
            return self._readers[source].read(path, row)
        except BadRowError as bad:
            return BadRowError(f"{path}, {self._readers[source].row_name} {row.row}: {bad}")
        except OSError as error:
            return UserError(f"{path} of the source {name!r} cannot be read any more: {error}")

    def _place(self, piece: int) -> tuple[int, int]:
        """The source, and the number of the piece in it."""
        source = bisect_right(self._ends, piece)
        return source, piece - (self._ends[source] - self.counts[source])


def _describe(name: str, index: PieceIndex) -> str:
    return f"{name}: {len(index.files):,} files, {len(index):,} pieces, {index.text_bytes / 2**20:,.1f} MiB"


class TextCorpus:
    """Documents of text, tokenized piece by piece; BOS and EOS stand only where a document starts and ends."""

    packed = True

    def __init__(self, texts: Texts, tokenizer: Tokenizer, *, add_bos: bool, add_eos: bool) -> None:
        self.counts = texts.counts
        self.description = texts.description
        self._texts = texts
        self._tokenizer = tokenizer
        self._bos = [tokenizer.bos_id] if add_bos and tokenizer.bos_id is not None else []
        self._eos = [tokenizer.eos_id] if add_eos and tokenizer.eos_id is not None else []

    def ahead(self, pieces: Sequence[int], num_tokens: int) -> int:
        num_bytes = 0
        for count, piece in enumerate(pieces, start=1):
            num_bytes += self._texts.num_bytes(piece)
            if num_bytes >= BYTES_PER_TOKEN * num_tokens:
                return count
        return len(pieces)

    def fetch(self, pieces: Sequence[int]) -> list[Tokens | Exception]:
        read = [self._texts.read(piece) for piece in pieces]
        encoded = iter(self._tokenizer.encode_batch([text for text in read if isinstance(text, str)]))
        return [
            self._with_separators(piece, next(encoded)) if isinstance(text, str) else text
            for piece, text in zip(pieces, read, strict=True)
        ]

    def _with_separators(self, piece: int, ids: list[int]) -> Tokens:
        flags = self._texts.row(piece).flags
        bos = self._bos if flags & STARTS_DOCUMENT else []
        eos = self._eos if flags & ENDS_DOCUMENT else []
        return np.array(bos + ids + eos, dtype=np.int64)
