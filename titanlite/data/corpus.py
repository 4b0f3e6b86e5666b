"""Pieces as tokens: all sources of a run behind one numbering."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from titanlite.data.index import PieceIndex, open_index, reader_of
from titanlite.data.pieces import ENDS_DOCUMENT, STARTS_DOCUMENT, BadRowError, Piece
from titanlite.data.retry import retrying
from titanlite.data.sources import SourceConfig, source_name
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import UserError

Tokens = npt.NDArray[np.integer]

AT_BEGIN = np.zeros(1, np.int64)
NOWHERE = np.empty(0, np.int64)

BYTES_PER_TOKEN = 3
"""About as many as English and code have; it decides only how far text is read ahead."""


class TokenPiece(NamedTuple):
    """A piece as tokens. starts: the places in it at which a document starts."""

    tokens: Tokens
    starts: npt.NDArray[np.int64]


NOTHING = TokenPiece(NOWHERE, NOWHERE)
"""A piece without tokens."""


class Corpus(Protocol):
    """The numbered pieces of a source.

    count: how many. size: in bytes of text or in tokens, see size_unit. windows: whether each piece is one sequence;
    else pieces are packed. description: what there is, in one line.
    """

    count: int
    size: int
    windows: bool
    description: str

    def ahead(self, pieces: Iterator[int], num_tokens: int) -> list[int]:
        """Those of the next `pieces` (at least 1) that are worth fetching at once for about `num_tokens` tokens."""
        ...

    def fetch(self, pieces: Sequence[int]) -> list[TokenPiece | Exception]:
        """For each piece its tokens, or what is to be raised by whoever consumes it: BadRowError, UserError."""
        ...


class Texts:
    """The pieces of sources of text, as text, numbered one source after the other.

    counts: pieces of each source. size, description: as of a Corpus.
    """

    def __init__(self, sources: Sequence[SourceConfig], max_piece_bytes: int) -> None:
        self._sources = [(source_name(source), open_index(source, max_piece_bytes)) for source in sources]
        self._readers = [reader_of(source) for source in sources]
        self.counts = tuple(len(index) for _, index in self._sources)
        self.size = sum(index.text_bytes for _, index in self._sources)
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
        what = f"{path} of the source {name!r}"
        try:
            return retrying(what, lambda: self._readers[source].read(path, row))
        except BadRowError as bad:
            return BadRowError(f"{path}, {self._readers[source].row_name} {row.row}: {bad}")
        except UserError as error:
            return error
        except OSError as error:
            return UserError(f"{what} cannot be read any more: {error}")

    def _place(self, piece: int) -> tuple[int, int]:
        """The source, and the number of the piece in it."""
        source = bisect_right(self._ends, piece)
        return source, piece - (self._ends[source] - self.counts[source])


def _describe(name: str, index: PieceIndex) -> str:
    return f"{name}: {len(index.files):,} files, {len(index):,} pieces, {index.text_bytes / 2**20:,.1f} MiB"


class Encoder:
    """Pieces of text to tokens; BOS and EOS stand only where a document starts and ends."""

    def __init__(self, tokenizer: Tokenizer, *, add_bos: bool, add_eos: bool) -> None:
        self._tokenizer = tokenizer
        self._bos = [tokenizer.bos_id] if add_bos and tokenizer.bos_id is not None else []
        self._eos = [tokenizer.eos_id] if add_eos and tokenizer.eos_id is not None else []

    def encode(self, pieces: Sequence[tuple[int, str | Exception]]) -> list[TokenPiece | Exception]:
        """pieces: (flags, text), tokenized in one batch; exceptions in place of texts are handed on."""
        encoded = iter(self._tokenizer.encode_batch([text for _, text in pieces if isinstance(text, str)]))
        return [self._piece(flags, next(encoded)) if isinstance(text, str) else text for flags, text in pieces]

    def _piece(self, flags: int, ids: list[int]) -> TokenPiece:
        starts = bool(flags & STARTS_DOCUMENT)
        tokens = np.array(
            (self._bos if starts else []) + ids + (self._eos if flags & ENDS_DOCUMENT else []), dtype=np.int64
        )
        return TokenPiece(tokens, AT_BEGIN if starts else NOWHERE)


class TextCorpus:
    """Documents of text, tokenized piece by piece."""

    windows = False

    def __init__(self, texts: Texts, tokenizer: Tokenizer, *, add_bos: bool, add_eos: bool) -> None:
        self.count = sum(texts.counts)
        self.size = texts.size
        self.description = texts.description
        self._texts = texts
        self._encoder = Encoder(tokenizer, add_bos=add_bos, add_eos=add_eos)

    def ahead(self, pieces: Iterator[int], num_tokens: int) -> list[int]:
        taken, num_bytes = list[int](), 0
        for piece in pieces:
            taken.append(piece)
            num_bytes += self._texts.num_bytes(piece)
            if num_bytes >= BYTES_PER_TOKEN * num_tokens:
                break
        return taken

    def fetch(self, pieces: Sequence[int]) -> list[TokenPiece | Exception]:
        return self._encoder.encode([(self._texts.row(piece).flags, self._texts.read(piece)) for piece in pieces])
