"""The cache of attention: keys and values of the columns that were read before."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from titanlite.models.attention import AttentionMask, attend_to_scores
from titanlite.models.capped_attention import capped_attention
from titanlite.models.mixer import Reading


class KeyValueCache:
    """In place of the core of one attention: attends to all columns read so far, in buffers of the full capacity; with
    a window, to the last ones, in buffers of up to two windows, or of one and the columns read at once.

    latent: width of values that are the first numbers of their keys, so that they need no buffer; 0: they are not.
    """

    def __init__(self, reading: Reading, window: int = 0, cap: float = 0.0, latent: int = 0) -> None:
        self._reading, self._window, self._cap, self._latent = reading, window, cap, latent
        self._first = 0  # the column at which the buffers begin
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def has_window_before(self, column: int) -> bool:
        """Whether the buffers have all columns that `column` sees."""
        return self._first <= max(column - self._window + 1, 0)

    def __call__(self, inputs: Sequence[Tensor], seen: AttentionMask | None, by_head: Mapping[str, Tensor]) -> Tensor:
        """Like the core; `seen` is None, since each row is one document."""
        assert seen is None, "rows of several documents cannot be read incrementally"
        queries, keys, values = (x.transpose(1, 2) for x in inputs)
        return self._attended(queries, keys, values, by_head.get("sinks")).transpose(1, 2)

    def _attended(self, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        window, cap = self._window, self._cap
        reading, count = self._reading, queries.shape[2]
        own, seen, end = reading.mask(count, window), reading.first_seen(window), reading.columns + count
        size = min(reading.capacity, window + max(window, count)) if window else reading.capacity
        is_full = self._keys is None or end - self._first > self._keys.shape[2]
        first = seen if is_full or reading.columns == 0 else self._first
        keys = self._keys = self._append(self._keys, keys, first, size)
        values = self._values = keys if self._latent else self._append(self._values, values, first, size)
        self._first = first
        keys, values = (x[:, :, seen - first : end - first] for x in (keys, values))
        if cap:
            capped: Tensor = capped_attention(queries, keys, values, own, 0, cap)[0]
            return capped
        out = attend_to_scores(queries, keys, values, own, is_causal=own is None and count > 1, sinks=sinks)
        return out[..., : self._latent] if self._latent else out

    def _append(self, buffer: Tensor | None, new: Tensor, first: int, size: int) -> Tensor:
        """The buffer (rows, heads, columns, head_dim), from column `first` on, with the new columns written into it; at
        least of `size` columns if it was full."""
        rows, heads, count, width = new.shape
        begin = self._reading.columns
        if buffer is None or begin + count - first > buffer.shape[2]:
            old, buffer = buffer, new.new_empty(rows, heads, size, width)
        else:
            old = buffer if first != self._first else None
        if old is not None:
            buffer[:, :, : begin - first] = old[:, :, first - self._first : begin - self._first].clone()
        buffer[:, :, begin - first : begin - first + count] = new
        return buffer
