"""A bounded memory of what was used last."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The values used last, as long as their sizes add up to at most `limit`; the very last one stays in any case."""

    def __init__(self, limit: int, size: Callable[[V], int]) -> None:
        self._limit = limit
        self._size = size
        self._total = 0
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of `key`, made now where it is not remembered."""
        if key not in self._values:
            self._values[key] = value = make()
            self._total += self._size(value)
            while self._total > self._limit and len(self._values) > 1:
                _, oldest = self._values.popitem(last=False)
                self._total -= self._size(oldest)
        self._values.move_to_end(key)
        return self._values[key]
