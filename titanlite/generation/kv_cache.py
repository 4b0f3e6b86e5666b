"""Incremental forward passes: the keys and values of earlier tokens, or the states of linear attention after them, are
cached instead of recomputed."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from titanlite.models.attention import attention_mask
from titanlite.models.decoder import Decoder
from titanlite.models.family import LanguageModel
from titanlite.models.mixer import Cache, mixers_of, own_values
from titanlite.parallel.own_code import has_own_code, replaced


class Reading:
    """A batch of token rows that a model reads a few columns at a time, inside `remembering`.

    Rows are padded on the left, so that all end in the same column. Padding has no position; a padding column attends
    only to itself (a softmax over nothing would be NaN), and no other column attends to it.

    padding: number of padding columns of each row, (rows, 1). capacity: total number of columns. columns: number of
    columns read so far. device: of the tokens.
    """

    def __init__(self, model: LanguageModel, padding: Sequence[int], capacity: int) -> None:
        parameter = next(model.parameters())
        self.capacity = capacity
        self.columns = 0
        self.device = parameter.device
        self._model = model
        self._is_padded = any(padding)
        self._dtype = parameter.dtype
        self.padding = torch.tensor(padding, device=parameter.device).unsqueeze(1)
        self._masks: dict[int, Tensor | None] = {}
        self.caches: list[Cache] = []

    def read(self, tokens: Tensor) -> Tensor:
        """Logits (rows, columns, vocab_size) of the next columns. tokens: int64 (rows, columns)."""
        columns = torch.arange(self.columns, self.columns + tokens.shape[1], device=tokens.device)
        self._masks.clear()
        with torch.inference_mode():
            logits: Tensor = self._model(tokens, (columns - self.padding).clamp_(min=0))
        self.columns += tokens.shape[1]
        return logits

    def rewind(self, columns: int, *, capacity: int) -> int:
        """Forget all columns from `columns` on, or all if a window before them is no longer in memory, and make room
        for `capacity` in total. Returns how many columns are left."""
        assert columns <= self.columns
        self.columns = columns if all(cache.has_window_before(columns) for cache in self.caches) else 0
        self.capacity = max(self.capacity, capacity)
        return self.columns

    def first_seen(self, window: int) -> int:
        """The first column that the next one sees with this window."""
        return max(self.columns - window + 1, 0) if window else 0

    def mask(self, count: int, window: int) -> Tensor | None:
        """Of the `count` columns being read, for attention with this window: 0 or -inf, (rows, 1, count, all columns
        from `first_seen` up to them); None: causal. Built once per call of `read`."""
        if window not in self._masks:
            self._masks[window] = self._mask_of(count, window)
        return self._masks[window]

    def _mask_of(self, count: int, window: int) -> Tensor | None:
        length = self.columns + count
        sees_all = count == 1 or (self.columns == 0 and not 0 < window < length)
        if sees_all and not self._is_padded:
            return None
        seen = torch.arange(self.first_seen(window), length, device=self.device)
        queries, first = seen[-count:].unsqueeze(1), self.padding.unsqueeze(2)
        visible = ((seen <= queries) & (seen >= first)) | (seen == queries)
        if window:
            visible &= queries - seen < window
        return torch.zeros_like(visible, dtype=self._dtype).masked_fill_(~visible, -torch.inf).unsqueeze(1)


class Rereading:
    """The same for models of any architecture: each call reads all columns again, row by row and without padding."""

    def __init__(self, model: LanguageModel, padding: Sequence[int]) -> None:
        self.device = next(model.parameters()).device
        self._model, self._padding = model, padding
        self._tokens: list[Tensor] = []

    @property
    def columns(self) -> int:
        """Number of columns read so far."""
        return sum(tokens.shape[1] for tokens in self._tokens)

    def rewind(self, columns: int, *, capacity: int) -> int:  # noqa: ARG002
        """Forget all columns from `columns` on. Returns how many are left."""
        self._tokens = [torch.cat(self._tokens, dim=1)[:, :columns]] if self._tokens else []
        return columns

    def read(self, tokens: Tensor) -> Tensor:
        """Logits (rows, 1, vocab_size) of the last column; 0 for a row that has only padding so far."""
        self._tokens.append(tokens)
        read = torch.cat(self._tokens, dim=1)
        with torch.inference_mode():
            rows = [row[missing:].unsqueeze(0) for row, missing in zip(read, self._padding, strict=True)]
            logits = [self._model(row)[:, -1:] if row.numel() else None for row in rows]
        empty = torch.zeros_like(next(row for row in logits if row is not None))
        return torch.cat([empty if row is None else row for row in logits])


@contextmanager
def remembering(model: LanguageModel, padding: Sequence[int], capacity: int) -> Iterator[Reading | Rereading]:
    """Replace the cores of the model by ones with a cache inside the block. padding, capacity: see Reading.

    Only of a Decoder (models/decoder.py) in which positions interact only in the `core` of each block, which has a
    cache. Other models read all columns again for each token.
    """
    if not isinstance(model, Decoder) or not _is_cacheable(model):
        yield Rereading(model, padding)
        return
    reading = Reading(model, padding, capacity)
    with ExitStack() as stack:
        reading.caches = [stack.enter_context(mixer.cached(reading)) for mixer in mixers_of([model])]
        yield reading


def _is_cacheable(model: Decoder) -> bool:
    """Whether positions interact only in the core of each block, which has a cache.

    Found by a forward pass without it: the logits of a position must not depend on the tokens before it.
    """
    mixers = mixers_of([model])
    if len(mixers) != len(model.layers) or model.attention_mask is not attention_mask:
        return False
    if not all(mixer.has_cache for mixer in mixers):
        return False
    if not has_own_code(model):
        return True
    device = next(model.parameters()).device
    with torch.inference_mode(), ExitStack() as stack:
        for mixer in mixers:
            stack.enter_context(replaced(mixer, "core", own_values))
        one, other = (model(torch.tensor([[*first, 0]], device=device))[:, -1] for first in ((0, 1, 2), (2, 0, 1)))
    return torch.allclose(one, other)
