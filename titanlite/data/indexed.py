"""Sources that can be indexed: any piece can be read at any time, so that their order is a permutation."""

from collections.abc import Iterator

from titanlite.data.order import Permutation
from titanlite.data.sources.pieces import Corpus, Place, TokenPiece

READ_AHEAD_PIECES = 64
"""At most so many pieces of one stream are tokenized in one batch."""

MIN_PATIENCE = 1000
"""Two epochs without any token mean that there is none; for a small source more, of which a stream has but a few."""


class IndexedOrder:
    """Numbered pieces in an order of their own in each epoch. epochs: how often they are read; -1: for ever."""

    def __init__(self, corpus: Corpus, permutation: Permutation, *, name: str, epochs: int) -> None:
        self.name = name
        self.size = corpus.size
        self.description = corpus.description
        self._corpus = corpus
        self._permutation = permutation
        self._epochs = epochs

    def pieces(self, stream: int, num_streams: int) -> "IndexedPieces":
        """Those of one stream."""
        return IndexedPieces(
            self._corpus,
            self._permutation,
            name=self.name,
            stream=stream,
            num_streams=num_streams,
            epochs=self._epochs,
        )


class IndexedPieces:
    """StreamPieces of one stream of S: those at the positions s, s + S, s + 2S, … of all epochs' permutations in a row.

    Place.position counts within the epoch.
    """

    def __init__(
        self, corpus: Corpus, permutation: Permutation, *, name: str, stream: int, num_streams: int, epochs: int
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
        return self._corpus.count == 0 or place.epoch >= self._epochs > 0

    def has(self, place: Place) -> bool:
        return place.position < max(1, self._corpus.count)

    def number(self, place: Place) -> int:
        if self._looked_up[0] != place:  # asked for twice in a row, for each window
            self._looked_up = (place, self._permutation.piece(*place))
        return self._looked_up[1]

    def fetch(self, place: Place, num_tokens: int) -> TokenPiece | Exception:
        if self.windows:
            return self._corpus.fetch([self.number(place)])[0]
        if place not in self._fetched:
            self._fetched.clear()  # a state was loaded
            self._fetch(place, num_tokens)
        return self._fetched.pop(place)

    def _fetch(self, place: Place, num_tokens: int) -> None:
        """Read it together with the next few so that they are tokenized in one batch."""
        places = [place]
        pieces = self._corpus.ahead(self._numbers(places), num_tokens)
        self._fetched.update(zip(places, self._corpus.fetch(pieces), strict=True))

    def _numbers(self, places: list[Place]) -> Iterator[int]:
        """Of the piece at places[0] and of those after it; `places` grows with what is asked for."""
        yield self.number(places[0])
        while len(places) < READ_AHEAD_PIECES and not self.has_ended(place := self.after(places[-1])):
            places.append(place)
            yield self.number(place)

    def _place(self, number: int) -> Place:
        """Of the piece with that number of all epochs' permutations in a row."""
        return Place(*divmod(number, self._corpus.count)) if self._corpus.count else Place(0, 0)
