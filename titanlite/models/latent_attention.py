"""Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts
Language Model", 2024, section 2.1): keys and values of all heads are projections of one narrow vector per position."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from titanlite.models.attention import AttentionMask
from titanlite.models.kv_cache import KeyValueCache
from titanlite.models.layers import HeadAttention, RMSNorm, RotaryTables, WholeRows
from titanlite.models.mixer import Cache, Reading
from titanlite.models.parts import Column, OwnPositions, Row

NORM_EPS = 1e-6
"""Of the norms of latent vectors: that of the published code, whatever norm_eps is."""


class LatentAttention(HeadAttention):
    """Causal self-attention with latent vectors.

    q_rank: width of the latent vector of queries; 0: queries are a projection of x. kv_rank: of that of keys and
    values. head_dim: width of queries and keys; the last rope_dim numbers are rotated, those of keys are the same for
    all heads, and adjacent numbers are a pair. value_dim: width of values.
    reads_latents: whether `heads` returns keys and values as latent vectors, which all heads share, and the queries for
    them: the same scores, for a cache of few numbers per position.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        head_dim: int,
        *,
        q_rank: int,
        kv_rank: int,
        rope_dim: int,
        value_dim: int,
        query_factor: float = 1.0,
    ) -> None:
        super().__init__(head_dim, query_factor)
        self.rope_dim = rope_dim
        self.value_dim = value_dim
        self.kv_rank = kv_rank
        self.reads_latents = False
        self.wq_a = OwnPositions(dim, q_rank, bias=False) if q_rank else None
        self.q_norm = RMSNorm(q_rank, NORM_EPS) if q_rank else None
        self.wq_b = Column(q_rank or dim, n_heads * head_dim, bias=False)
        self.wkv_a = OwnPositions(dim, kv_rank + rope_dim, bias=False)
        self.kv_norm = RMSNorm(kv_rank, NORM_EPS)
        self.wkv_b = Column(kv_rank, n_heads * (head_dim - rope_dim + value_dim), bias=False)
        self.wo = Row(n_heads * value_dim, dim, bias=False)
        self.whole_rows = WholeRows()

    def heads(self, x: Tensor, rope: RotaryTables) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, rotated, and values: (batch, seq_len, heads, width) each. With tensor parallelism, x has
        the positions of this rank."""
        of_queries = x if self.wq_a is None or self.q_norm is None else self.q_norm(self.wq_a(x))
        latent, rotated = self.wkv_a(x).split([self.kv_rank, self.rope_dim], dim=-1)
        of_queries, latent, rotated = self.whole_rows(of_queries, self.kv_norm(latent), rotated)
        rotated = rope.rotate(halves(rotated).unsqueeze(2))
        queries = self.wq_b(of_queries).unflatten(-1, (-1, self.head_dim))
        plain, turned = queries.split([self.head_dim - self.rope_dim, self.rope_dim], dim=-1)
        turned = rope.rotate(halves(turned))
        if self.reads_latents:
            of_keys, _ = self._weights()
            plain = torch.einsum("bshn,hnr->bshr", plain, of_keys)
            factor = self.query_factor * math.sqrt((self.kv_rank + self.rope_dim) / self.head_dim)
            latent = latent.unsqueeze(2)
            return torch.cat((plain, turned), -1) * factor, torch.cat((latent, rotated), -1), latent
        keys, values = self.wkv_b(latent).unflatten(-1, (-1, self._width)).split(self._widths, dim=-1)
        keys = torch.cat((keys, rotated.expand(-1, -1, keys.shape[2], -1)), -1)
        queries = torch.cat((plain, turned), -1)
        return queries if self.query_factor == 1 else queries * self.query_factor, keys, values

    def attended(self, queries: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask | None) -> Tensor:
        attended = self.core((queries, keys, values), mask, {})
        if self.reads_latents:
            attended = torch.einsum("bshr,hvr->bshv", attended, self._weights()[1])
        out: Tensor = self.wo(attended.flatten(2))
        return out

    def cache(self, reading: Reading) -> Cache:
        return KeyValueCache(reading, latent=self.kv_rank)

    @contextmanager
    def cached(self, reading: Reading) -> Iterator[Cache]:
        self.reads_latents = True
        try:
            with super().cached(reading) as cache:
                yield cache
        finally:
            self.reads_latents = False

    @property
    def _widths(self) -> list[int]:
        return [self.head_dim - self.rope_dim, self.value_dim]

    @property
    def _width(self) -> int:
        return sum(self._widths)

    def _weights(self) -> tuple[Tensor, Tensor]:
        """Those of wkv_b for keys and for values: (heads, width, kv_rank)."""
        of_keys, of_values = self.wkv_b.weight.unflatten(0, (-1, self._width)).split(self._widths, dim=1)
        return of_keys, of_values


def halves(x: Tensor) -> Tensor:
    """Adjacent pairs along the last dimension as pairs that are half a width apart, which RotaryTables rotates."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
