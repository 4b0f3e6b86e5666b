"""Incremental forward passes: the keys and values of earlier tokens, or the states of linear attention after them, are
cached instead of recomputed."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from titanlite.models.attention import AttentionMask, attend, attend_to_scores, attention_mask
from titanlite.models.capped_attention import capped_attention
from titanlite.models.decoder import Decoder
from titanlite.models.delta_rule import gated_delta_rule
from titanlite.models.family import LanguageModel
from titanlite.models.latent_attention import LatentAttention
from titanlite.models.layers import HeadAttention
from titanlite.models.linear_attention import GatedDeltaNet, convolve, gates_of, mix
from titanlite.parallel.own_code import has_own_code, replaced


class Cache(Protocol):
    def has_window_before(self, column: int) -> bool:
        """Whether the cache has what `column` needs of the columns before it."""


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


class KeyValueCache:
    """Replaces the `attend` of one Attention: attends to all columns read so far, in buffers of the full capacity; with
    a window, to the last ones, in buffers of up to two windows, or of one and the columns read at once.

    latent: width of values that are the first numbers of their keys, so that they need no buffer; 0: they are not.
    """

    def __init__(self, reading: Reading, latent: int = 0) -> None:
        self._reading = reading
        self._latent = latent
        self._window = 0
        self._first = 0  # the column at which the buffers begin
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def has_window_before(self, column: int) -> bool:
        """Whether the buffers have all columns that `column` sees."""
        return self._first <= max(column - self._window + 1, 0)

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: AttentionMask | None,
        window: int = 0,
        sinks: Tensor | None = None,
        cap: float = 0.0,
    ) -> Tensor:
        """Like attend in models/attention.py; `mask` is None, since each row is one document."""
        assert mask is None, "rows of several documents cannot be read incrementally"
        reading, count = self._reading, queries.shape[2]
        own, seen, end = reading.mask(count, window), reading.first_seen(window), reading.columns + count
        self._window = window
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


class StateCache:
    """Replaces the `mix` of one GatedDeltaNet: keeps its states after the last column, and the inputs of its
    convolutions that the next column sees. The first column of a row after padding starts a document."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._state: Tensor | None = None
        self._inputs: list[Tensor] = []
        self._end = 0  # the column after the last one that was read

    def has_window_before(self, column: int) -> bool:
        return column == self._end

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        decays: Tensor,
        betas: Tensor,
        starts: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        """Like mix in models/linear_attention.py; `starts` is None, since each row is one document."""
        assert starts is None, "rows of several documents cannot be read incrementally"
        begin, inputs = self._reading.columns, [queries, keys, values]
        earlier = min(begin, weights[0].shape[-1] - 1)
        if begin:
            inputs = [torch.cat(both, dim=1) for both in zip(self._inputs, inputs, strict=True)]
        self._end = begin + queries.shape[1]
        columns = torch.arange(begin - earlier, self._end, device=queries.device)
        starts = columns == self._reading.padding
        convolved = [convolve(x, taps, starts)[:, earlier:] for x, taps in zip(inputs, weights, strict=False)]
        queries, keys, values = convolved
        decays, betas = gates_of(decays, betas, *weights[3:])
        state = self._state if begin else None
        out, self._state = gated_delta_rule(queries, keys, values, decays, betas, starts[:, earlier:], state)
        kept = min(self._end, weights[0].shape[-1] - 1)
        self._inputs = [x[:, x.shape[1] - kept :] for x in inputs]
        return out


@contextmanager
def remembering(model: LanguageModel, padding: Sequence[int], capacity: int) -> Iterator[Reading | Rereading]:
    """Replace the model's attention by cached attention inside the block. padding, capacity: see Reading.

    Only of a Decoder (models/decoder.py) in which positions interact only in the default `attend` or `mix` of each
    block, whose queries and keys are already rotated by `positions`. Other models read all columns again for each
    token.
    """
    layers = [module for module in model.modules() if isinstance(module, HeadAttention | GatedDeltaNet)]
    if not isinstance(model, Decoder) or not _is_cacheable(model, layers):
        yield Rereading(model, padding)
        return
    reading = Reading(model, padding, capacity)
    with ExitStack() as stack:
        for layer in layers:
            cache: KeyValueCache | StateCache
            if isinstance(layer, GatedDeltaNet):
                name, cache = "mix", StateCache(reading)
            else:
                latent = layer.kv_rank if isinstance(layer, LatentAttention) else 0
                name, cache = "attend", KeyValueCache(reading, latent)
            stack.enter_context(replaced(layer, name, cache))
            reading.caches.append(cache)
        stack.callback(_set_latents, layers, read=False)
        _set_latents(layers, read=True)
        yield reading


def _set_latents(layers: Sequence[nn.Module], *, read: bool) -> None:
    for layer in layers:
        if isinstance(layer, LatentAttention):
            layer.reads_latents = read


def _is_cacheable(model: Decoder, layers: Sequence[HeadAttention | GatedDeltaNet]) -> bool:
    """Whether positions interact only in the default `attend` or `mix` of each block.

    Found by a forward pass without it: the logits of a position must not depend on the tokens before it.
    """
    if len(layers) != len(model.layers) or model.attention_mask is not attention_mask:
        return False
    if any(
        layer.mix is not mix if isinstance(layer, GatedDeltaNet) else layer.attend is not attend for layer in layers
    ):
        return False
    if not has_own_code(model):
        return True
    device = next(model.parameters()).device
    with torch.inference_mode(), ExitStack() as stack:
        for layer in layers:
            name = "mix" if isinstance(layer, GatedDeltaNet) else "attend"
            stack.enter_context(replaced(layer, name, _without_attention))
        one, other = (model(torch.tensor([[*first, 0]], device=device))[:, -1] for first in ((0, 1, 2), (2, 0, 1)))
    return torch.allclose(one, other)


def _without_attention(queries: Tensor, _keys: Tensor, values: Tensor, *_others: Any, **_options: Any) -> Tensor:
    return queries.new_zeros(*queries.shape[:-1], values.shape[-1])
