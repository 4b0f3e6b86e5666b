"""Canonical streams: the order in which tokens are trained on, whatever the mesh.

A run has S streams. Each sequence of a stream comes from one source, as the mixture says; of a source, the stream reads
pieces of its own, one after the other, and cuts them into sequences.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from titanlite.batch import IGNORE_INDEX
from titanlite.data.order import Mixture
from titanlite.data.sources.pieces import NOWHERE, BadRowError, Place, StreamPieces, TokenPiece
from titanlite.runtime.errors import UserError

logger = logging.getLogger("titanlite")

PAD_TOKEN = 0
"""Stands where there is no token; its label is IGNORE_INDEX and causal attention hides it from the tokens before."""


class SourceState(NamedTuple):
    """All that a stream has to remember of one source.

    epoch, position: the place of the piece at which it stands. offset: the place in that piece of the next sequence's
    first token. sequences: how many it has handed out. bad_rows: how many rows were skipped.
    """

    epoch: int
    position: int
    offset: int
    sequences: int
    bad_rows: int


class Origin(NamedTuple):
    """Where a sequence's first token lies: token `offset` of a piece of a source, in an epoch. No token: all but the
    source are -1."""

    source: int
    epoch: int
    piece: int
    offset: int


class Row(NamedTuple):
    """What a sequence is written to, int64 (seq_len,) each. positions: None where nobody asks for them."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64] | None


@dataclass(frozen=True)
class BadRowPolicy:
    """skip: go on after a bad row, up to `limit` of them. logs: whether each is named in a warning."""

    skip: bool
    limit: int
    logs: bool = True

    def check(self, bad: BadRowError, count: int) -> None:
        """Raise UserError unless the `count`-th bad row is skipped, too."""
        if not self.skip:
            raise UserError(f'bad row: {bad}; mend it, or skip and count such rows: data.on_bad_row = "skip"')
        if count > self.limit:
            raise UserError(f"more than data.max_bad_rows = {self.limit} rows are bad; the last one: {bad}")


class _Part(NamedTuple):
    """Tokens of one piece that stand in a sequence: those from `offset` on. starts: where in them documents start."""

    epoch: int
    piece: int
    offset: int
    tokens: npt.NDArray[np.integer]
    starts: npt.NDArray[np.int64]


class SourceStream:
    """What one stream reads of one source.

    packing "concatenate": its tokens in a row are cut into sequences of seq_len + 1 at stride seq_len: neighbours share
    one token, so that each token but the first is a target exactly once. "none": each piece is cut so by itself.

    A piece is fetched when a sequence needs it, and a bad row is raised or counted there; since this depends on the
    stream alone, it happens at the same step on every mesh. Bad rows are counted in the first epoch only: once each. A
    stream raises when its own count passes the limit; the sum over all streams is for the trainer to watch.
    """

    def __init__(
        self, pieces: StreamPieces, *, seq_len: int, packing: Literal["concatenate", "none"], policy: BadRowPolicy
    ) -> None:
        self._pieces = pieces
        self._seq_len = seq_len
        self._take = self._window if pieces.windows else self._packed if packing == "concatenate" else self._alone
        self._policy = policy
        self._order = np.arange(seq_len)
        self.load_state(SourceState(*pieces.first(), 0, 0, 0))

    @property
    def ended(self) -> bool:
        """Whether nothing but masked sequences is left."""
        return self._pieces.has_ended(self._place)

    @property
    def sequences(self) -> int:
        """How many were handed out, masked ones included."""
        return self._sequences

    def state(self) -> SourceState:
        return SourceState(*self._place, self._offset, self._sequences, self._bad_rows)

    def load_state(self, state: SourceState) -> None:
        """Continue exactly there; one piece is tokenized again. Raises UserError where there is no such place."""
        self._place = Place(state.epoch, state.position)
        if min(state) < 0 or not self._pieces.has(self._place):
            raise UserError(f"the source {self._pieces.name!r} has no piece for the saved state {state}")
        self._offset, self._sequences, self._bad_rows = state.offset, state.sequences, state.bad_rows
        self._current: TokenPiece | None = None
        self._fruitless = 0

    def next_sequence(self, row: Row) -> tuple[int, int, int]:
        """Writes it into `row`, fully masked once the source has ended. Returns (epoch, piece, offset) of its first
        token, (-1, -1, -1) where there is none. Raises UserError."""
        parts = self._take()
        self._sequences += 1
        return parts[0][:3] if self._write(parts, row) else (-1, -1, -1)

    def _packed(self) -> list[_Part]:
        """Up to seq_len + 1 tokens; the last one stays to be the first of the next sequence."""
        taken: list[_Part] = []
        need = self._seq_len + 1
        while not self.ended:
            rest = self._rest(need)
            if rest >= need:
                taken.append(self._part(need))
                self._offset += need - 1
                self._end_if_used_up(rest - (need - 1))
                break
            if rest:
                taken.append(self._part(rest))
            need -= rest
            self._advance()
        return taken

    def _alone(self) -> list[_Part]:
        """Up to seq_len + 1 tokens of one piece; a piece with a single token has nothing to predict."""
        while not self.ended:
            rest = self._rest(self._seq_len + 1)
            if rest > 1:
                part = self._part(min(rest, self._seq_len + 1))
                self._offset += self._seq_len
                if rest <= self._seq_len + 1:
                    self._advance()
                return [part]
            self._advance()
        return []

    def _window(self) -> list[_Part]:
        """The next piece, which is one sequence."""
        if self.ended:
            return []
        part = self._part(self._rest(self._seq_len))
        self._advance()
        return [part]

    def _part(self, count: int) -> _Part:
        """The next `count` tokens of the current piece."""
        assert self._current is not None
        self._fruitless = 0
        tokens, starts = self._current
        begin, end = self._offset, self._offset + count
        if len(tokens) > count:
            starts = starts[(starts >= begin) & (starts < end)] - begin
        number = self._pieces.number(self._place)
        return _Part(self._place.epoch, number, begin, tokens[begin:end], starts)

    def _write(self, parts: list[_Part], row: Row) -> bool:
        """Inputs and their next tokens, padded and masked where there are fewer than seq_len + 1 tokens.

        Returns whether there is anything to predict.
        """
        joined = parts[0].tokens if len(parts) == 1 else np.concatenate([part.tokens for part in parts] or [NOWHERE])
        count = len(joined) if len(joined) > 1 else 0  # a token alone has nothing to predict
        row.tokens[:count] = joined[: min(count, self._seq_len)]
        row.tokens[count:] = PAD_TOKEN
        row.labels[: max(0, count - 1)] = joined[1:count]
        row.labels[max(0, count - 1) :] = IGNORE_INDEX
        if row.positions is not None:
            row.positions[:] = self._order
            for start in _document_starts(parts) if count else ():
                # What a document begins with cannot be known from the one before it: it is no target.
                row.labels[start - 1] = IGNORE_INDEX
                row.positions[start:] = self._order[: max(0, self._seq_len - start)]
        return count > 0

    def _advance(self) -> None:
        """Step to the next piece."""
        self._fruitless += 1  # _part() sets it back
        if self._fruitless > self._pieces.patience:
            raise UserError(
                f"none of the last {self._pieces.patience:,} pieces that a data stream has read of {self._pieces.name} "
                f"has a token that can be trained on ({self._bad_rows} bad rows were skipped); mend the data"
            )
        self._current, self._offset = None, 0
        self._place = self._pieces.after(self._place)

    def _end_if_used_up(self, rest: int) -> None:
        """End a finite source of which only the token is left that was a target already."""
        if rest == 1 and self._pieces.has_ended(self._pieces.after(self._place)):
            self._advance()

    def _rest(self, num_tokens: int) -> int:
        """Tokens left of the current piece, fetched now where it was not yet; none where it is a bad row that is
        skipped."""
        if self._current is None:
            self._current = self._usable(self._pieces.fetch(self._place, num_tokens))
            if self._offset and self._offset >= len(self._current.tokens):
                raise UserError(
                    f"{self._pieces.name}: a data stream cannot continue: its piece has {len(self._current.tokens)} "
                    f"tokens, the saved state stands at token {self._offset}; the data or the tokenizer is not the one "
                    "of the earlier run"
                )
        return len(self._current.tokens) - self._offset

    def _usable(self, fetched: TokenPiece | Exception) -> TokenPiece:
        if isinstance(fetched, BadRowError):
            first_epoch = self._place.epoch == 0
            self._bad_rows += first_epoch
            self._policy.check(fetched, self._bad_rows)
            if first_epoch and self._policy.logs:
                logger.warning("skipped a bad row: %s", fetched)
            return TokenPiece(NOWHERE, NOWHERE)
        if isinstance(fetched, Exception):
            raise fetched
        return fetched


def _document_starts(parts: Sequence[_Part]) -> Iterator[int]:
    """The places of a sequence at which documents start, but for its first token."""
    place = 0
    for n, part in enumerate(parts):
        # The first token of a part starts a document unless the part goes on with the document of the one before.
        goes_on = n > 0 and part.piece == parts[n - 1].piece + 1 and 0 not in part.starts
        if n > 0 and not goes_on:
            yield place
        yield from (place + start for start in part.starts.tolist() if start > 0)
        place += len(part.tokens)


class Stream:
    """One of the S streams: a sequence of one source after the other, as the mixture says."""

    def __init__(self, number: int, sources: Sequence[SourceStream], mixture: Mixture) -> None:
        self._number = number
        self._sources = sources
        self._mixture = mixture

    @property
    def sequences(self) -> int:
        """How many were handed out."""
        return sum(source.sequences for source in self._sources)

    @property
    def ended(self) -> list[bool]:
        """Of each source, whether nothing is left of it but masked sequences."""
        return [source.ended for source in self._sources]

    def state(self) -> list[int]:
        """The fields of the SourceState of each source, one source after the other."""
        return [value for source in self._sources for value in source.state()]

    def load_state(self, values: Sequence[int]) -> None:
        """Continue exactly there. Raises UserError where there is no such place."""
        size = len(SourceState._fields)
        for n, source in enumerate(self._sources):
            source.load_state(SourceState(*values[n * size : (n + 1) * size]))

    def next_sequence(self, row: Row) -> Origin:
        """Writes it into `row`. Raises UserError."""
        source = self._mixture.source(self._number, self.sequences)
        return Origin(source, *self._sources[source].next_sequence(row))
