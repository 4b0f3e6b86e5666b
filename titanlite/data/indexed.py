"""Order of indexed sources: any piece can be read at any time, so the order is a permutation."""

from collections.abc import Iterator

from titanlite.data.order import Permutation
from titanlite.data.sources.pieces import Corpus, Place, TokenPiece

READ_AHEAD_PIECES = 64
"""Maximum pieces of one stream that are tokenized in one batch."""

MIN_PATIENCE = 1000
"""Minimum patience, for small sources. Larger ones have a patience of two epochs: see StreamPieces.patience."""


class IndexedPieces:
    """StreamPieces of stream s of S: positions s, s + S, s + 2S, … of the concatenated permutations of all epochs.

    Place.position is the position within the epoch. epochs: number of epochs; -1: no limit.
    """

    def __init__(
        self, corpus: Corpus, permutation: Permutation, stream: int, *, num_streams: int, name: str, epochs: int
    ) -> None:
        self.windows = corpus.windows
        self.name = name
        self.patience = max(MIN_PATIENCE, 2 * corpus.count) * max(1, epochs)
        self._corpus = corpus
        self._permutation = permutation
        self._stream = stream
        self._num_streams = num_streams
        self._epochs = epochs
        self._fetched: dict[Place, TokenPiece | Exception] = {}
        self._looked_up = (Place(-1, -1), -1)

    def first(self) -> Place:
        return self._place(self._stream)

    def after(self, place: Place) -> Place:
        return self._place(place.epoch * self._corpus.count + place.position + self._num_streams)

    def has_ended(self, place: Place) -> bool:
        return place.epoch >= self._epochs > 0

    def has(self, place: Place) -> bool:
        return place.position < self._corpus.count

    def epochs(self, place: Place) -> float:
        passed = (place.epoch * self._corpus.count + place.position - self._stream) // self._num_streams
        return passed / self._corpus.count

    def number(self, place: Place) -> int:
        if self._looked_up[0] != place:  # called twice for each window
            self._looked_up = (place, self._permutation.piece(*place))
        return self._looked_up[1]

    def fetch(self, place: Place, num_tokens: int) -> TokenPiece | Exception:
        if self.windows:
            return self._corpus.fetch([self.number(place)])[0]
        if place not in self._fetched:  # read the piece and the next few, and tokenize them in one batch
            places = [place]
            pieces = self._corpus.ahead(self._numbers(places), num_tokens)
            self._fetched = dict(zip(places, self._corpus.fetch(pieces), strict=True))
        return self._fetched.pop(place)

    def _numbers(self, places: list[Place]) -> Iterator[int]:
        """Yield the piece number at places[0] and the following ones; append the place of each to `places`."""
        yield self.number(places[0])
        while len(places) < READ_AHEAD_PIECES and not self.has_ended(place := self.after(places[-1])):
            places.append(place)
            yield self.number(place)

    def _place(self, number: int) -> Place:
        """Place of position `number` of the concatenated permutations of all epochs."""
        return Place(*divmod(number, self._corpus.count))
