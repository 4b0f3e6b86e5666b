"""Streams: the order in which tokens are trained on, the same on every mesh.

A run has S streams. The mixture selects the source of each sequence of a stream. Of each source, a stream reads its own
pieces one after the other and packs them into sequences.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from titanlite.batch import IGNORE_INDEX
from titanlite.data.packing import MAX_WINDOW_PIECES, WINDOW_SEQUENCES, Packing, Span, best_fit
from titanlite.data.sources.pieces import EMPTY, EMPTY_PIECE, BadRowError, Place, StreamPieces, TokenPiece
from titanlite.runtime.errors import UserError
from titanlite.runtime.text import counted

logger = logging.getLogger("titanlite")

TooLong = Literal["truncate", "skip"]


def fitted_length(conversation: TokenPiece, seq_len: int, too_long: TooLong) -> int:
    """How many first tokens of a conversation a sequence of seq_len + 1 tokens has; 0 if they have no target."""
    tokens, _, trained = conversation
    if len(tokens) > seq_len + 1 and too_long == "skip":
        return 0
    length = min(len(tokens), seq_len + 1)
    has_target = length > 1 and (trained is None or trained[1:length].any())
    return length if has_target else 0


def piece_lengths(pieces: Sequence[TokenPiece], seq_len: int, too_long: TooLong | None) -> list[int]:
    """Tokens of each piece; of conversations, those that a sequence has. too_long: None if these are documents."""
    if too_long is None:
        return [len(piece.tokens) for piece in pieces]
    return [fitted_length(piece, seq_len, too_long) for piece in pieces]


_SAME_DATA = "use the data and the tokenizer of the run that is resumed"

PAD_TOKEN = 0
"""Fills a sequence after its last token. Its label is IGNORE_INDEX; causal attention hides it from earlier tokens."""


class SourceState(NamedTuple):
    """The state of one source in a stream.

    epoch, position: the current piece. offset: index in this piece of the next sequence's first token. With packing
    "best_fit", the first piece of the packing window, and the index in this window of the next sequence. sequences:
    number of sequences returned. bad_rows: number of rows skipped. too_long: number of conversations that were longer
    than a sequence, truncated or skipped.
    """

    epoch: int
    position: int
    offset: int
    sequences: int
    bad_rows: int
    too_long: int


class Origin(NamedTuple):
    """The origin of a sequence's first token: source, epoch, piece, and index of the token in the piece.

    If the sequence has no token, epoch, piece and offset are -1.
    """

    source: int
    epoch: int
    piece: int
    offset: int


class SequenceRow(NamedTuple):
    """Output arrays of a sequence, int64 (seq_len,). positions: None without data.document_mask. length: int64 (1,),
    positions that hold a token of a document, see Batch."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64] | None
    length: npt.NDArray[np.int64]


@dataclass(frozen=True)
class BadRowPolicy:
    """skip: skip up to `limit` bad rows instead of raising. logs: whether each skipped row is logged as a warning."""

    skip: bool
    limit: int
    logs: bool = True

    def check(self, bad: BadRowError, count: int) -> None:
        """Raise UserError unless the policy skips the `count`-th bad row."""
        if not self.skip:
            raise UserError(f'bad row: {bad}; fix or delete it, or skip bad rows: data.on_bad_row = "skip"')
        if count > self.limit:
            raise UserError(f"more than data.max_bad_rows = {self.limit} bad rows; the last one: {bad}")


class _Part(NamedTuple):
    """Tokens of one piece in a sequence, from `offset`. starts: the indices in `tokens` at which documents start.
    trained: see TokenPiece."""

    epoch: int
    piece: int
    offset: int
    tokens: npt.NDArray[np.integer]
    starts: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_] | None

    def slice(self, begin: int, count: int) -> "_Part":
        """`count` tokens from index `begin` of this part."""
        end, starts = begin + count, self.starts
        if len(self.tokens) > count:
            starts = starts[(starts >= begin) & (starts < end)] - begin
        own = None if self.trained is None else self.trained[begin:end]
        return _Part(self.epoch, self.piece, self.offset + begin, self.tokens[begin:end], starts, own)


class _PackingWindow(NamedTuple):
    """sequences: spans of `pieces`. after: the place of the next window."""

    pieces: list[_Part]
    sequences: list[list[Span]]
    after: Place


class SourceStream:
    """The sequences of one source in one stream.

    packing "concatenate": joins the tokens of all pieces and cuts sequences of seq_len + 1 tokens at stride seq_len.
    Neighboring sequences share one token, so each token except the first is a target exactly once. "none": cuts each
    piece separately in the same way. "best_fit": reads a window of pieces, cuts those of more than seq_len + 1 tokens
    in the same way, and packs pieces and parts by best_fit.

    Conversations, of sources with `too_long`, are not cut: a sequence has as many consecutive ones as fit into seq_len
    + 1 tokens, with packing "none" one, with "best_fit" some of a window. Of one that is longer, it has the beginning,
    or with too_long "skip" nothing.

    Fetches a piece or packing window when a sequence needs it, and raises or counts a bad row then. This depends on the
    stream alone, so it happens at the same step on every mesh. Bad rows and conversations that are too long are counted
    in the first epoch only, once each. A stream raises if its own count of bad rows exceeds the limit; the trainer
    checks the sum over all streams.
    """

    def __init__(
        self,
        pieces: StreamPieces,
        *,
        packing: Packing,
        policy: BadRowPolicy,
        too_long: TooLong | None = None,
        first_window: float = 1.0,
    ) -> None:
        """too_long: None if the pieces are not conversations. first_window: size of the first packing window, relative
        to that of the others: it differs by stream, as otherwise all streams would tokenize windows at the same
        steps."""
        self._pieces = pieces
        self._packing = packing
        self._too_long: TooLong | None = too_long
        self._first_window = first_window
        if packing == "best_fit":
            self._take = self._packed
        elif too_long is not None:
            self._take = self._conversations
        elif pieces.windows:
            self._take = self._window
        else:
            self._take = self._concatenated if packing == "concatenate" else self._single_piece
        self._policy = policy
        self.load_state(SourceState(*pieces.first(), 0, 0, 0, 0))

    @property
    def ended(self) -> bool:
        """Whether the source is exhausted: all further sequences are masked."""
        return self._pieces.has_ended(self._place)

    def state(self) -> SourceState:
        return SourceState(*self._place, self._offset, self.sequences, self._bad_rows, self._num_too_long)

    def epochs(self, state: SourceState) -> float:
        """The part of the source that this stream has read at `state`, see StreamPieces.epochs."""
        return self._pieces.epochs(Place(state.epoch, state.position))

    def load_state(self, state: SourceState) -> None:
        """Continue at `state`; tokenizes one piece or packing window again. Raises UserError if the source has no such
        piece."""
        self._place = Place(state.epoch, state.position)
        if min(state) < 0 or not self._pieces.has(self._place):
            raise UserError(f"the source {self._pieces.name!r} has no piece at the saved state {state}")
        self._offset, self._bad_rows, self._num_too_long = state.offset, state.bad_rows, state.too_long
        self.sequences = state.sequences
        """Number of sequences returned, including masked ones."""
        self._current: TokenPiece | None = None
        self._packing_window: _PackingWindow | None = None
        self._pieces_without_target = 0

    def next_sequence(self, row: SequenceRow) -> tuple[int, int, int]:
        """Write the next sequence into `row`, fully masked if the source is exhausted. Its length is that of `row`.

        Returns (epoch, piece, offset) of its first token; (-1, -1, -1) if masked. Raises UserError.
        """
        parts = self._take(len(row.tokens))
        self.sequences += 1
        return parts[0][:3] if self._write(parts, row) else (-1, -1, -1)

    def _concatenated(self, seq_len: int) -> list[_Part]:
        """Up to seq_len + 1 tokens of consecutive pieces; the next sequence starts with the last of these tokens."""
        taken: list[_Part] = []
        need = seq_len + 1
        while not self.ended:
            rest = self._rest(need)
            if rest >= need:
                taken.append(self._part(need))
                self._offset += need - 1
                self._skip_used_tail(rest - (need - 1))
                break
            if rest:
                taken.append(self._part(rest))
            need -= rest
            self._advance()
        return taken

    def _single_piece(self, seq_len: int) -> list[_Part]:
        """Up to seq_len + 1 tokens of one piece. Skips pieces of a single token: they have no target."""
        while not self.ended:
            rest = self._rest(seq_len + 1)
            if rest > 1:
                part = self._part(min(rest, seq_len + 1))
                self._offset += seq_len
                if rest <= seq_len + 1:
                    self._advance()
                return [part]
            self._advance()
        return []

    def _conversations(self, seq_len: int) -> list[_Part]:
        """The next conversations that fit into a sequence together. Passes over those without a target."""
        assert self._too_long is not None
        taken: list[_Part] = []
        room = seq_len + 1
        while not self.ended and (self._packing == "concatenate" or not taken):
            length = self._rest(seq_len + 1)
            assert self._current is not None
            count = fitted_length(self._current, seq_len, self._too_long)
            if count > room:
                break
            if count:
                taken.append(self._part(count))
                room -= count
            self._num_too_long += length > seq_len + 1 and self._is_counted
            self._advance()
        return taken

    def _window(self, seq_len: int) -> list[_Part]:
        """The next piece, which is one sequence of the longest stage, or its next part."""
        if self.ended:
            return []
        rest = self._rest(seq_len + 1)
        part = self._part(min(rest, seq_len + 1))
        self._offset += seq_len
        if rest <= seq_len + 1:
            self._advance()
        return [part]

    def _packed(self, seq_len: int) -> list[_Part]:
        """The next sequence of the packing window, or of the next one that has any."""
        while not self.ended:
            window = self._packing_window = self._packing_window or self._read_packing_window(seq_len)
            count, index = len(window.sequences), self._offset
            if index and index >= count:
                raise UserError(
                    f"{self._pieces.name}: a stream cannot resume at sequence {index} of a packing window of {count} "
                    f"sequences; {_SAME_DATA}"
                )
            self._offset += 1
            if self._offset >= count:
                self._place, self._offset, self._packing_window = window.after, 0, None
            if count:
                return [window.pieces[piece].slice(begin, size) for piece, begin, size in window.sequences[index]]
        return []

    def _read_packing_window(self, seq_len: int) -> _PackingWindow:
        """Read and pack the window at the current place, which remains. It has WINDOW_SEQUENCES sequences of tokens."""
        start, pieces, lengths, num_pieces = self._place, list[_Part](), list[int](), 0
        size = WINDOW_SEQUENCES * (self._first_window if start == self._pieces.first() else 1.0)
        need = math.ceil(size) * seq_len
        while need > 0 and num_pieces < MAX_WINDOW_PIECES and not self.ended:
            piece = self._usable(self._pieces.fetch(self._place, need))
            length = len(piece.tokens)
            if self._too_long is not None:
                self._num_too_long += length > seq_len + 1 and self._is_counted
                length = fitted_length(piece, seq_len, self._too_long)
            if length > 1:
                # A sequence takes a few pieces of a window: their tokens stay in memory, in 32 bits.
                piece = piece._replace(tokens=piece.tokens[:length].astype(np.int32))
                pieces.append(_Part(self._place.epoch, self._pieces.number(self._place), 0, *piece))
                lengths.append(length)
                self._pieces_without_target = 0
                need -= length
            num_pieces += 1
            self._pass_piece()
        after, self._place = self._place, start
        return _PackingWindow(pieces, best_fit(lengths, seq_len), after)

    def _part(self, count: int) -> _Part:
        """The next `count` tokens of the current piece."""
        assert self._current is not None
        self._pieces_without_target = 0
        part = _Part(self._place.epoch, self._pieces.number(self._place), 0, *self._current)
        return part.slice(self._offset, count)

    def _write(self, parts: list[_Part], row: SequenceRow) -> bool:
        """Write inputs and labels, padded and masked after the last token. Returns whether there is any target."""
        joined = parts[0].tokens if len(parts) == 1 else np.concatenate([part.tokens for part in parts] or [EMPTY])
        count = len(joined) if len(joined) > 1 else 0  # a single token has no target
        seq_len = len(row.tokens)
        row.length[0] = min(count, seq_len)
        row.tokens[:count] = joined[: min(count, seq_len)]
        row.tokens[count:] = PAD_TOKEN
        row.labels[: max(0, count - 1)] = joined[1:count]
        row.labels[max(0, count - 1) :] = IGNORE_INDEX
        trained = [part.trained for part in parts if part.trained is not None]  # of all parts or of none
        if trained:
            row.labels[: count - 1][~np.concatenate(trained)[1:count]] = IGNORE_INDEX
        if row.positions is not None:
            order = np.arange(seq_len)
            row.positions[:] = order
            for start in _document_starts(parts) if count else ():
                # The previous document does not predict the first token of a document: it is not a target.
                row.labels[start - 1] = IGNORE_INDEX
                row.positions[start:] = order[: max(0, seq_len - start)]
        return count > 0

    def _advance(self) -> None:
        """Step to the next piece, at its first token."""
        self._current, self._offset = None, 0
        self._pass_piece()

    def _pass_piece(self) -> None:
        """Step to the next piece. Raises UserError after too many pieces without a target."""
        self._pieces_without_target += 1  # a part of the piece has reset it
        if self._pieces_without_target > self._pieces.patience:
            what, counts = "documents (or parts of long ones)", f"{self._bad_rows} bad rows were skipped"
            remedy = "look at the source with titanlite inspect CONFIG --all, and fix or remove it"
            if self._too_long is not None:
                what = "conversations"
                some = counted(self._num_too_long, "conversation")
                counts += f", {some} had more than training.seq_len + 1 tokens"
                remedy = f"increase training.seq_len, or {remedy}" if self._num_too_long else remedy
            raise UserError(
                f"{self._pieces.name}: {self._pieces.patience:,} consecutive {what} have no token to train on "
                f"({counts}); {remedy}"
            )
        self._place = self._pieces.after(self._place)

    def _skip_used_tail(self, rest: int) -> None:
        """Advance past the last piece of a finite source if its only remaining token was a target already."""
        if rest == 1 and self._pieces.has_ended(self._pieces.after(self._place)):
            self._advance()

    def _rest(self, num_tokens: int) -> int:
        """Number of tokens left in the current piece; 0 for a skipped bad row. Fetches the piece if necessary."""
        if self._current is None:
            self._current = self._usable(self._pieces.fetch(self._place, num_tokens))
            if self._offset and self._offset >= len(self._current.tokens):
                raise UserError(
                    f"{self._pieces.name}: a stream cannot resume at token {self._offset} of a piece: the piece has "
                    f"{len(self._current.tokens)} tokens; {_SAME_DATA}"
                )
        return len(self._current.tokens) - self._offset

    @property
    def _is_counted(self) -> bool:
        """Whether to count the piece at the current place if it is bad or too long: in the first epoch, and only when
        its packing window is read for the first time."""
        return self._place.epoch == 0 and not (self._packing == "best_fit" and self._offset)

    def _usable(self, fetched: TokenPiece | Exception) -> TokenPiece:
        if isinstance(fetched, BadRowError):
            self._bad_rows += self._is_counted
            self._policy.check(fetched, self._bad_rows)
            if self._is_counted and self._policy.logs:
                logger.warning("skipped a bad row: %s", fetched)
            return EMPTY_PIECE
        if isinstance(fetched, Exception):
            raise fetched
        return fetched


def _document_starts(parts: Sequence[_Part]) -> Iterator[int]:
    """Indices in a sequence at which documents start, except 0."""
    place = 0
    for n, part in enumerate(parts):
        # The first token of a part starts a document unless the part continues the previous part's document.
        continues = n > 0 and not part.offset and part.piece == parts[n - 1].piece + 1 and 0 not in part.starts
        if n > 0 and not continues:
            yield place
        yield from (place + start for start in part.starts.tolist() if start > 0)
        place += len(part.tokens)
