"""What a block calls between its norms: the only module in which positions meet, and in it only in `core`."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn


class Reading(Protocol):
    """Rows that are read a few columns at a time, see generation/kv_cache.py."""

    columns: int
    capacity: int
    padding: Tensor

    def first_seen(self, window: int) -> int: ...
    def mask(self, count: int, window: int) -> Tensor | None: ...


class Cache(Protocol):
    """In place of a core: it also reads what it has kept of earlier columns."""

    def __call__(self, inputs: Sequence[Tensor], seen: Tensor | None, by_head: Mapping[str, Tensor]) -> Tensor: ...

    def has_window_before(self, column: int) -> bool:
        """Whether the cache has what `column` needs of the columns before it."""


class Mixer(nn.Module):
    """Projections of a position, a `core` in which positions meet, and a projection of its results.

    window: positions that each one sees, its own included; 0: all up to its own.
    gathered: inputs of the core of which a query may see those of all ranks, with the form "gather" of context
    parallelism; (): the ranks exchange heads for positions.
    """

    window: int = 0
    gathered: ClassVar[tuple[int, ...]] = ()

    def core(self, inputs: Sequence[Tensor], seen: Tensor | None, by_head: Mapping[str, Tensor]) -> Tensor:
        """The results of all heads, (batch, seq_len, heads, width). Context parallelism calls it with the heads of a
        rank, and generation replaces it.

        inputs: queries, keys, values, and others, each (batch, seq_len, heads, width) with its own heads and width. A
        result has the width of the third one, or of the last of fewer. Heads must not interact.
        seen: see `context`. by_head: parameters, and others, whose first dimension is that of heads.
        """
        raise NotImplementedError

    @property
    def sees(self) -> Hashable:
        """Mixers of a class that are alike in this have the same `context`."""
        return self.window

    @property
    def kind_of_context(self) -> Hashable:
        """Equal for mixers with the same `context`."""
        return type(self).context, self.sees

    def context(self, document_ids: Tensor | None, dtype: torch.dtype, head_dim: int, mask: Callable[..., Any]) -> Any:
        """What the core must know of the documents. mask: attention_mask of the model, which may know no windows."""
        return mask(document_ids, dtype, head_dim, **({"window": self.window} if self.window else {}))

    @property
    def has_cache(self) -> bool:
        """Whether `cache` is one for this core: a class that defines a core or a context without a cache has none."""
        owner = next(kind for kind in type(self).__mro__ if {"core", "context", "cache"} & vars(kind).keys())
        return owner is not Mixer and "cache" in vars(owner)

    def cache(self, reading: Reading) -> Cache:
        """What replaces the core in generation. Without one, all tokens are read again for each new one."""
        raise NotImplementedError

    @contextmanager
    def cached(self, reading: Reading) -> Iterator[Cache]:
        """Replace the core by one with a cache inside the block."""
        cache, own = self.cache(reading), vars(self).get("core")
        self.core = cache  # type: ignore[method-assign]
        try:
            yield cache
        finally:
            del self.core
            if own is not None:
                self.core = own  # type: ignore[method-assign]


def own_values(inputs: Sequence[Tensor], *_: Any) -> Tensor:
    """In place of a core: results of its shape that depend on all inputs of their own position, and on no other."""
    values = inputs[min(len(inputs), 3) - 1]
    values = values.repeat_interleave(max(x.shape[2] for x in inputs) // values.shape[2], dim=2)
    return torch.stack([x.mean((2, 3), dtype=values.dtype) for x in inputs]).sum(0)[..., None, None] + values


def mixers_of(model_parts: Iterable[nn.Module]) -> list[Mixer]:
    return [module for part in model_parts for module in part.modules() if isinstance(module, Mixer)]
