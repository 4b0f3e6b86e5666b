"""Reading on where a model stopped: keys and values of what it has read are kept, not computed again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from titanlite.models.attention import AttentionMask
from titanlite.models.family import LanguageModel
from titanlite.models.layers import Attention


class Reading:
    """Rows of tokens that a model reads a few columns at a time, as inside `remembering`.

    Rows of unequal length end in the same column: the shorter ones begin later. What stands before is padding, which
    has no position, sees itself only (a softmax over nothing would be NaN) and is seen by nobody else.

    padding: columns before each row's first token. capacity: columns that will ever be read. columns: that were read.
    mask: for the columns that are being read, 0 or -inf: (rows, 1, columns being read, all up to them); None: causal.
    """

    def __init__(self, model: LanguageModel, padding: Sequence[int], capacity: int) -> None:
        parameter = next(model.parameters())
        self.capacity = capacity
        self.columns = 0
        self.mask: Tensor | None = None
        self._model = model
        self._is_padded = any(padding)
        self._dtype = parameter.dtype
        self._padding = torch.tensor(padding, device=parameter.device).unsqueeze(1)

    def read(self, tokens: Tensor) -> Tensor:
        """Logits (rows, columns, vocab_size) after each of the next columns; tokens: int64 (rows, columns)."""
        columns = torch.arange(self.columns, self.columns + tokens.shape[1], device=tokens.device)
        with torch.inference_mode():
            self.mask = self._mask_of(columns)
            logits: Tensor = self._model(tokens, (columns - self._padding).clamp_(min=0))
        self.columns += tokens.shape[1]
        return logits

    def _mask_of(self, columns: Tensor) -> Tensor | None:
        one_sees_all = len(columns) == 1 or self.columns == 0
        if one_sees_all and not self._is_padded:
            return None
        seen = torch.arange(self.columns + len(columns), device=columns.device)
        queries, first = columns.unsqueeze(1), self._padding.unsqueeze(2)
        visible = ((seen <= queries) & (seen >= first)) | (seen == queries)
        return torch.zeros_like(visible, dtype=self._dtype).masked_fill_(~visible, -torch.inf).unsqueeze(1)


class KeyValueCache:
    """In place of the `attend` of one Attention: attends to all that was read, in buffers of the reading's capacity."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask | None) -> Tensor:
        """As models/attention.py's attend; `mask` is None, since each row is one document."""
        assert mask is None, "rows of several documents cannot be read bit by bit"
        begin, count = self._reading.columns, queries.shape[2]
        keys = self._keys = self._kept(self._keys, keys, begin)
        values = self._values = self._kept(self._values, values, begin)
        return functional.scaled_dot_product_attention(
            queries,
            keys[:, :, : begin + count],
            values[:, :, : begin + count],
            attn_mask=self._reading.mask,
            is_causal=self._reading.mask is None and count > 1,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )

    def _kept(self, buffer: Tensor | None, new: Tensor, begin: int) -> Tensor:
        """The buffer (rows, heads, capacity, head_dim), with the new columns in it."""
        rows, heads, count, width = new.shape
        if buffer is None:
            buffer = new.new_empty(rows, heads, self._reading.capacity, width)
        buffer[:, :, begin : begin + count] = new
        return buffer


@contextmanager
def remembering(model: LanguageModel, padding: Sequence[int], capacity: int) -> Iterator[Reading]:
    """The model reads bit by bit inside; after it, it is as it was. padding, capacity: see Reading.

    Asked of a family: all that lets one position depend on another happens in modules of models/layers.py's
    Attention, called with queries and keys that are rotated by `positions` already. Raises TypeError where it has none.
    """
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if not layers:
        raise TypeError(
            f"{type(model).__name__} cannot generate: it has no module of titanlite.models.layers.Attention"
        )
    kernels = [layer.attend for layer in layers]
    reading = Reading(model, padding, capacity)
    for layer in layers:
        layer.attend = KeyValueCache(reading)
    try:
        yield reading
    finally:
        for layer, kernel in zip(layers, kernels, strict=True):
            layer.attend = kernel
