"""Canonical streams: the order in which tokens are trained on, whatever the mesh.

A run has S streams; stream s owns the pieces at positions s, s + S, s + 2S, … of each epoch's permutation. It joins
their tokens and cuts sequences of seq_len + 1 tokens at stride seq_len: neighbours share one token, so that each token
but the stream's first is a target exactly once.
"""

import logging
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from titanlite.data.corpus import Corpus, Tokens
from titanlite.data.permutation import Permutation
from titanlite.data.pieces import BadRowError
from titanlite.loss import IGNORE_INDEX
from titanlite.runtime.errors import UserError

logger = logging.getLogger("titanlite")

PAD_TOKEN = 0
"""Stands where there is no token; its label is IGNORE_INDEX and causal attention hides it from the tokens before."""

READ_AHEAD_PIECES = 64
"""At most so many pieces of one stream are tokenized in one batch."""


class StreamState(NamedTuple):
    """All that a stream has to remember.

    epoch, position: the piece at which it stands, `position` in the stream's own order. offset: the place in that piece
    of the next sequence's first token. sequences: how many were handed out. bad_rows: how many rows were skipped.
    """

    epoch: int = 0
    position: int = 0
    offset: int = 0
    sequences: int = 0
    bad_rows: int = 0


@dataclass(frozen=True)
class BadRowPolicy:
    """skip: go on after a bad row, up to `limit` of them."""

    skip: bool
    limit: int

    def check(self, bad: BadRowError, count: int) -> None:
        """Raise UserError unless the `count`-th bad row is skipped, too."""
        if not self.skip:
            raise UserError(f'bad row: {bad}; mend it, or skip and count such rows: data.on_bad_row = "skip"')
        if count > self.limit:
            raise UserError(f"more than data.max_bad_rows = {self.limit} rows are bad; the last one: {bad}")


class Stream:
    """One of the S streams. `epochs` is how often it reads its pieces; None: for ever.

    A piece is fetched when a sequence needs it, and a bad row is raised or counted there; since this depends on the
    stream alone, it happens at the same step on every mesh. Bad rows are counted in the first epoch only: once each. A
    stream raises when its own count passes the limit; the sum over all streams is for the trainer to watch.
    """

    def __init__(
        self,
        corpus: Corpus,
        permutation: Permutation,
        *,
        stream: int,
        num_streams: int,
        seq_len: int,
        epochs: int | None,
        policy: BadRowPolicy,
    ) -> None:
        self._corpus = corpus
        self._permutation = permutation
        self._stream = stream
        self._num_streams = num_streams
        self._seq_len = seq_len
        self._epochs = epochs
        self._policy = policy
        self._count = len(range(stream, permutation.total, num_streams))
        self.load_state(StreamState())

    @property
    def ended(self) -> bool:
        """Whether nothing but masked sequences is left."""
        return self._epochs is not None and (self._epoch >= self._epochs or self._count == 0)

    def state(self) -> StreamState:
        return StreamState(self._epoch, self._position, self._offset, self._sequences, self._bad_rows)

    def load_state(self, state: StreamState) -> None:
        """Continue exactly there; one piece is tokenized again. Raises UserError where there is no such place."""
        if min(state) < 0 or (state.position and state.position >= self._count):
            raise UserError(f"stream {self._stream} has {self._count} pieces, and the saved state is {state}")
        self._epoch, self._position, self._offset, self._sequences, self._bad_rows = state
        self._epoch_has_tokens = False
        self._current: Tokens | None = None
        self._fetched: dict[int, Tokens | Exception] = {}

    def next_sequence(self) -> tuple[Tokens, Tokens]:
        """(tokens, labels), int64 (seq_len,) each; fully masked once the stream has ended. Raises UserError."""
        taken = self._next_packed() if self._corpus.packed else self._next_window()
        self._sequences += 1
        return self._pair(taken)

    def _next_packed(self) -> list[Tokens]:
        """Up to seq_len + 1 tokens; the last one stays to be the first of the next sequence."""
        taken: list[Tokens] = []
        need = self._seq_len + 1
        while not self.ended:
            rest = self._piece(need)[self._offset :]
            if len(rest) >= need:
                taken.append(rest[:need])
                self._offset += need - 1
                self._end_if_used_up()
                break
            taken.append(rest)
            need -= len(rest)
            self._advance()
        return taken

    def _next_window(self) -> list[Tokens]:
        """The next piece, which is one sequence."""
        if self.ended:
            return []
        window = self._piece(self._seq_len)
        self._advance()
        return [window]

    def _pair(self, taken: list[Tokens]) -> tuple[Tokens, Tokens]:
        """Inputs and their next tokens, padded and masked where there are fewer than seq_len + 1 tokens."""
        joined = np.concatenate(taken) if taken else np.empty(0, np.int64)
        tokens = np.full(self._seq_len, PAD_TOKEN, np.int64)
        labels = np.full(self._seq_len, IGNORE_INDEX, np.int64)
        if len(joined) > 1:  # a token alone has nothing to predict
            tokens[: len(joined)] = joined[: self._seq_len]
            labels[: len(joined) - 1] = joined[1:]
        return tokens, labels

    def _advance(self) -> None:
        """Step to the next piece, over the end of the epoch."""
        self._current, self._offset = None, 0
        self._position += 1
        if self._position == self._count:
            self._next_epoch()

    def _next_epoch(self) -> None:
        if self._epochs is None and not self._epoch_has_tokens:
            raise UserError(
                f"none of the {self._count} pieces of data stream {self._stream} has a token that can be trained on "
                f"({self._bad_rows} bad rows were skipped); mend the data, or set a smaller data.num_streams"
            )
        self._epoch += 1
        self._position, self._offset = 0, 0
        self._epoch_has_tokens = False
        self._fetched.clear()

    def _end_if_used_up(self) -> None:
        """End a finite stream of which only the token is left that was a target already."""
        assert self._current is not None
        last_piece = self._epochs == self._epoch + 1 and self._position == self._count - 1
        if last_piece and self._offset == len(self._current) - 1:
            self._advance()

    def _piece(self, num_tokens: int) -> Tokens:
        """The tokens of the current piece; none where it is a bad row that is skipped."""
        if self._current is None:
            self._current = self._usable(self._fetch(num_tokens))
            self._epoch_has_tokens |= len(self._current) > 0
            if self._offset and self._offset >= len(self._current):
                raise UserError(
                    f"data stream {self._stream} cannot continue: its piece has {len(self._current)} tokens, the saved "
                    f"state stands at token {self._offset}; the data or the tokenizer is not the one of the earlier run"
                )
        return self._current

    def _usable(self, fetched: Tokens | Exception) -> Tokens:
        if isinstance(fetched, BadRowError):
            self._bad_rows += self._epoch == 0
            self._policy.check(fetched, self._bad_rows)
            if self._epoch == 0:
                logger.warning("skipped a bad row: %s", fetched)
            return np.empty(0, np.int64)
        if isinstance(fetched, Exception):
            raise fetched
        return fetched

    def _fetch(self, num_tokens: int) -> Tokens | Exception:
        """The current piece, read together with the next few of the epoch so that they are tokenized in one batch."""
        if self._position not in self._fetched:
            positions = range(self._position, min(self._count, self._position + READ_AHEAD_PIECES))
            pieces = [self._permutation.piece(self._epoch, self._stream + p * self._num_streams) for p in positions]
            pieces = pieces[: self._corpus.ahead(pieces, num_tokens)]
            self._fetched.update(zip(positions, self._corpus.fetch(pieces), strict=False))
        return self._fetched.pop(self._position)
