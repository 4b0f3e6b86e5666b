"""Gated linear attention: the layers of models/delta_rule.py with their projections, convolution and gates."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from titanlite.models.delta_rule import gated_delta_rule
from titanlite.models.layers import OfHeads, RMSNorm, RotaryTables
from titanlite.models.mixer import Cache, Mixer, Reading
from titanlite.models.parts import Column, Init, Role, Row
from titanlite.models.watch import watch

CONVOLUTIONS = ("conv_q", "conv_k", "conv_v")


class Taps(OfHeads):
    """Weights of a causal convolution of each channel with its last positions, (channels, 1, taps); read by a call."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__(channels, Role(width="unknown"))
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))


class GatedDeltaNet(Mixer):
    """Attention by the gated delta rule (Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024).

    Queries, keys and values are projections of x, convolved with the last `taps` positions of their document; each of
    key_heads heads of queries and keys is for value_heads / key_heads adjacent heads of values. The decay of a head's
    state is exp(-exp(a_log) softplus(wa x + dt_bias)), its rate sigmoid(wb x). Each head of the result is normalized,
    and multiplied by silu(wg x).
    """

    watch = staticmethod(watch)
    gathers = True
    sees = "starts"

    def __init__(
        self, dim: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, taps: int, norm_eps: float
    ) -> None:
        super().__init__()
        self.key_dim, self.value_dim = key_dim, value_dim
        keys, values = key_heads * key_dim, value_heads * value_dim
        self.wq = Column(dim, keys, bias=False)
        self.wk = Column(dim, keys, bias=False)
        self.wv = Column(dim, values, bias=False)
        self.wg = Column(dim, values, bias=False)
        self.wa = Column(dim, value_heads, bias=False)
        self.wb = Column(dim, value_heads, bias=False)
        self.conv_q = Taps(keys, taps)
        self.conv_k = Taps(keys, taps)
        self.conv_v = Taps(values, taps)
        self.a_log = OfHeads(value_heads, Role(Init("log_uniform", 16.0), "unknown"))
        self.dt_bias = OfHeads(value_heads, Role(Init("ones"), "unknown"))
        self.out_norm = RMSNorm(value_dim, norm_eps)
        self.wo = Row(values, dim, bias=False)

    def forward(self, x: Tensor, _rope: RotaryTables, starts: Tensor | None) -> Tensor:
        """x: (batch, seq_len, dim); starts: of documents, see document_starts. Returns (batch, seq_len, dim)."""
        queries, keys = (linear(x).unflatten(-1, (-1, self.key_dim)) for linear in (self.wq, self.wk))
        values, gates = (linear(x).unflatten(-1, (-1, self.value_dim)) for linear in (self.wv, self.wg))
        inputs = queries, keys, values, self.wa(x).unsqueeze(-1), self.wb(x).unsqueeze(-1)
        by_head = {name: getattr(self, name)() for name in (*CONVOLUTIONS, "a_log", "dt_bias")}
        mixed = self.core(inputs, starts, by_head)
        out: Tensor = self.wo((self.out_norm(mixed) * functional.silu(gates)).flatten(2))
        return out

    def core(self, inputs: Sequence[Tensor], seen: Tensor | None, by_head: Mapping[str, Tensor]) -> Tensor:
        *convolved, decays, betas = inputs
        queries, keys, values = (
            convolve(x, by_head[name], seen) for x, name in zip(convolved, CONVOLUTIONS, strict=True)
        )
        gates = gates_of(decays.squeeze(-1), betas.squeeze(-1), by_head["a_log"], by_head["dt_bias"])
        return gated_delta_rule(queries, keys, values, *gates, seen)[0]

    def context(self, document_ids: Tensor | None, *_: Any) -> Tensor | None:
        return document_starts(document_ids)

    def cache(self, reading: Reading) -> Cache:
        return StateCache(reading)


class StateCache:
    """In place of the core of one GatedDeltaNet: keeps its states after the last column, and the inputs of its
    convolutions that the next column sees. The first column of a row after padding starts a document."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._state: Tensor | None = None
        self._inputs: list[Tensor] = []
        self._end = 0  # the column after the last one that was read

    def has_window_before(self, column: int) -> bool:
        return column == self._end

    def __call__(self, inputs: Sequence[Tensor], seen: Tensor | None, by_head: Mapping[str, Tensor]) -> Tensor:
        """Like the core; `seen` is None, since each row is one document."""
        assert seen is None, "rows of several documents cannot be read incrementally"
        queries, keys, values, decays, betas = inputs
        weights = [*by_head.values()]
        begin, inputs = self._reading.columns, [queries, keys, values]
        earlier = min(begin, weights[0].shape[-1] - 1)
        if begin:
            inputs = [torch.cat(both, dim=1) for both in zip(self._inputs, inputs, strict=True)]
        self._end = begin + queries.shape[1]
        columns = torch.arange(begin - earlier, self._end, device=queries.device)
        starts = columns == self._reading.padding
        convolved = [convolve(x, taps, starts)[:, earlier:] for x, taps in zip(inputs, weights, strict=False)]
        queries, keys, values = convolved
        decays, betas = gates_of(decays.squeeze(-1), betas.squeeze(-1), *weights[3:])
        state = self._state if begin else None
        out, self._state = gated_delta_rule(queries, keys, values, decays, betas, starts[:, earlier:], state)
        kept = min(self._end, weights[0].shape[-1] - 1)
        self._inputs = [x[:, x.shape[1] - kept :] for x in inputs]
        return out


def document_starts(document_ids: Tensor | None) -> Tensor | None:
    """Whether a document starts at a position, bool (batch, seq_len); None: each row is one document."""
    if document_ids is None:
        return None
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return starts


def gates_of(decays: Tensor, betas: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms of decays, and rates, in promote_types(dtype, float32)."""
    wide = torch.promote_types(decays.dtype, torch.float32)
    return -a_log.to(wide).exp() * functional.softplus(decays.to(wide) + dt_bias.to(wide)), betas.to(wide).sigmoid()


def convolve(x: Tensor, taps: Tensor, starts: Tensor | None) -> Tensor:
    """silu of each channel's convolution with its last positions, those of other documents left out.

    x: (batch, seq_len, heads, width); taps: (heads x width, 1, number), the last one for the own position.
    """
    out: Tensor = _Convolution.apply(x.flatten(2), taps.squeeze(1), starts)  # type: ignore[no-untyped-call]
    return out.view_as(x)


class _Convolution(torch.autograd.Function):
    """Computed in promote_types(dtype, float32). Backward computes the convolution again from its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor, starts: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, taps, starts)
        return functional.silu(_convolved(x, taps, starts)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, taps, starts = ctx.saved_tensors
        out = _convolved(x, taps, starts)
        share = out.sigmoid()
        own = gradient * (share * (1 + out * (1 - share)))
        wide_taps = taps.to(own.dtype)
        of_x = own * wide_taps[:, -1]
        of_taps = [(own * x).sum((0, 1))]
        for distance, is_seen in _earlier(x, taps, starts):
            later = own[:, distance:] if is_seen is None else own[:, distance:] * is_seen
            of_x[:, :-distance].addcmul_(later, wide_taps[:, -1 - distance])
            of_taps.append((later * x[:, :-distance]).sum((0, 1)))
        missing = taps.shape[1] - len(of_taps)
        of_taps += [torch.zeros_like(of_taps[0])] * missing
        return of_x.to(x.dtype), torch.stack(of_taps[::-1], dim=1).to(taps.dtype), None


def _convolved(x: Tensor, taps: Tensor, starts: Tensor | None) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    x, taps = x.to(wide), taps.to(wide)
    out = x * taps[:, -1]
    for distance, is_seen in _earlier(x, taps, starts):
        earlier = x[:, :-distance] if is_seen is None else x[:, :-distance] * is_seen
        out[:, distance:].addcmul_(earlier, taps[:, -1 - distance])
    return out


def _earlier(x: Tensor, taps: Tensor, starts: Tensor | None) -> list[tuple[int, Tensor | None]]:
    """Each distance to an earlier position, with whether that is of the same document: (batch, positions, 1)."""
    found: list[tuple[int, Tensor | None]] = []
    documents = None if starts is None else starts.cumsum(1)
    for distance in range(1, min(taps.shape[1], x.shape[1])):
        same = None if documents is None else (documents[:, distance:] == documents[:, :-distance]).unsqueeze(-1)
        found.append((distance, same))
    return found
