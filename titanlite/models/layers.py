"""Layers shared by model families: plain torch, independent of parallelism.

Operations in higher precision use promote_types(dtype, float32), so a float64 model computes in float64 throughout.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from titanlite.models.attention import AttentionMask, Kernel, attend
from titanlite.models.kv_cache import KeyValueCache
from titanlite.models.linear import gated
from titanlite.models.mixer import Cache, Mixer, Reading
from titanlite.models.parts import NORM, VECTOR, Column, Role, Roles, Row, RowPart
from titanlite.models.watch import watch


class RopeScaling(Protocol):
    """A scaling of rotary wavelengths, for contexts longer than in pretraining."""

    @property
    def table_factor(self) -> float:
        """Factor of all cosines and sines."""

    def apply(self, inv_freq: Tensor) -> Tensor:
        """Scale `inv_freq`, theta^(-2 i / head_dim) radians per position, (head_dim / 2,); same shape and dtype."""


@dataclass(frozen=True)
class LinearScaling:
    """All wavelengths are multiplied by `factor` (Chen et al., "Extending Context Window of Large Language Models via
    Positional Interpolation", 2023)."""

    factor: float
    table_factor: ClassVar[float] = 1.0

    def apply(self, inv_freq: Tensor) -> Tensor:
        return inv_freq / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling.

    Source: Grattafiori et al., "The Llama 3 Herd of Models" (2024), and the code published with its weights.
    factor: by which long wavelengths are multiplied; 1 changes nothing.
    low_freq_factor, high_freq_factor: wavelengths above original_seq_len / low_freq_factor are multiplied by `factor`,
    those below original_seq_len / high_freq_factor are unchanged, those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_seq_len: int
    table_factor: ClassVar[float] = 1.0

    def apply(self, inv_freq: Tensor) -> Tensor:
        turns = inv_freq * (self.original_seq_len / (2 * math.pi))  # full turns within the original context
        unscaled = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        unscaled = unscaled.clamp(0.0, 1.0)
        return inv_freq * (unscaled + (1.0 - unscaled) / self.factor)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN's scaling (Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023).

    factor: by which long wavelengths are multiplied. theta: base of the wavelengths. beta_fast, beta_slow: pairs that
    make more than beta_fast turns within original_seq_len are unchanged, those with less than beta_slow are multiplied
    by `factor`, those between are interpolated linearly in their index, between integer indexes if `truncates`, as in
    the code published with the paper. Attention scores grow by table_factor^2.
    """

    factor: float
    theta: float
    beta_fast: float
    beta_slow: float
    original_seq_len: int
    truncates: bool = True

    @property
    def table_factor(self) -> float:
        return 0.1 * math.log(self.factor) + 1.0

    def apply(self, inv_freq: Tensor) -> Tensor:
        pairs = len(inv_freq)
        first, last = self._index(self.beta_fast, pairs), self._index(self.beta_slow, pairs)
        if self.truncates:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        stretched = torch.arange(pairs, dtype=inv_freq.dtype) - first
        stretched = (stretched / (last - first if last > first else 0.001)).clamp(0.0, 1.0)
        return inv_freq * (1.0 - stretched) + inv_freq / self.factor * stretched

    def _index(self, turns: float, pairs: int) -> float:
        """The index of the pair, as a real number, that makes so many turns within original_seq_len."""
        return pairs * math.log(self.original_seq_len / (turns * 2 * math.pi)) / math.log(self.theta)


Sum = Callable[[Tensor], Tensor]


class RMSNorm(nn.RMSNorm):
    """RMSNorm (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019): x / rms(x) * (offset + weight)."""

    eps: float  # in torch it may be None, too

    def __init__(self, dim: int, eps: float, offset: float = 0.0, role: Role = NORM) -> None:
        super().__init__(dim, eps)
        self.offset = offset
        self.roles: Roles = {"weight": replace(role, offset=offset)}

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, dim), normalized along dim. Returns the same shape and dtype."""
        return rms_norm(x, self.factor(self.weight), self.eps)

    def factor(self, weight: Tensor) -> Tensor:
        """offset + weight, or of a part of the weight: with an offset in at least float32."""
        return weight if self.offset == 0 else weight.to(torch.promote_types(weight.dtype, torch.float32)) + self.offset


class WideNorm(RMSNorm):
    """RMSNorm of all heads of a position together."""

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seq_len, heads, head_dim). Returns the same shape and dtype."""
        return super().forward(x.flatten(2)).view_as(x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight along the last dimension, computed in promote_types(x.dtype, float32)."""
    out: Tensor
    if x.device.type == "cpu":
        out = _RMSNorm.apply(x, weight, eps, 1, _same)  # type: ignore[no-untyped-call]
    else:
        wide = torch.promote_types(x.dtype, weight.dtype)
        out = functional.rms_norm(x.to(wide), weight.shape, weight, eps).to(x.dtype)
    return out


def rms_norm_of_part(x: Tensor, weight: Tensor, eps: float, parts: int, total: Sum) -> Tensor:
    """`rms_norm` of one of `parts` equal parts of each vector, with its part of the weight. total: the sum of a tensor
    over the parts."""
    out: Tensor = _RMSNorm.apply(x, weight, eps, parts, total)  # type: ignore[no-untyped-call]
    return out


def _same(x: Tensor) -> Tensor:
    return x


class _RMSNorm(torch.autograd.Function):
    """On a CPU torch composes its rms_norm of single operations, whose backward pass takes 3 times as long as this one,
    and whose saved tensors take twice the memory (docs/LOG.md)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, parts: int, total: Sum) -> Tensor:
        ctx.dim, ctx.total = parts * x.shape[-1], total
        wide = torch.promote_types(x.dtype, torch.float32)
        square = total(torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square_())
        inverse = square.div_(ctx.dim).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        # A view: compiled by torch 2.11, a result that an operation changed in place has a gradient of zero.
        return (x * inverse).mul_(weight).to(x.dtype).view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """With n = x * inverse and g = gradient * weight, the gradient of x is inverse * (g - n * mean(g * n)), and
        that of the weight is the sum of gradient * n."""
        x, weight, inverse = ctx.saved_tensors
        wide = inverse.dtype
        product = (gradient.to(wide) * x).mul_(inverse)
        mean = ctx.total(product @ weight.to(wide)).div_(ctx.dim).unsqueeze(-1)
        x_grad = (gradient.to(wide) * weight).addcmul_(x, mean * inverse, value=-1).mul_(inverse)
        return x_grad.to(x.dtype), product.flatten(0, -2).sum(0).to(weight.dtype), None, None, None


class RotaryTables:
    """Cosines and sines of one forward pass: (seq_len or more, head_dim), or (batch, seq_len, head_dim). A scaling may
    multiply them by a factor.

    The columns i and i + head_dim / 2 have the same angle, and the sines of the first half are negative.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate each head of `x` (batch, seq_len, heads, head_dim) by its position; same shape and dtype.

        Element i of a head is paired with element i + head_dim / 2, as in weights in Hugging Face format, so wq and wk
        need no permutation. (Meta's own files pair adjacent elements, 2i with 2i + 1.)
        Computed in promote_types(x.dtype, float32), by type promotion with the tables. Of heads that are wider than the
        tables, the rest is not rotated.
        """
        if (width := self.cos.shape[-1]) < x.shape[-1]:
            return torch.cat((self.rotate(x[..., :width]), x[..., width:]), dim=-1)
        seq_len = x.shape[1]
        cos = self.cos[..., :seq_len, :].unsqueeze(-2)
        sin = self.sin[..., :seq_len, :].unsqueeze(-2)
        rotated: Tensor = _Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
        return rotated


class _Rotation(torch.autograd.Function):
    """x * cos + swap(x) * sin, where swap exchanges the halves of a head. Backward rotates back (and multiplies by the
    same factor).

    Half of the time of plain operations on a CPU, whose gradients are padded with zeros and added.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin).view_as(x)  # see _RMSNorm

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(gradient, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1).to(torch.promote_types(x.dtype, cos.dtype))
    return swapped.mul_(sin).addcmul_(x, cos).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Tables of rotary position embeddings (Su et al., "RoFormer", 2021) for positions 0 … max_seq_len - 1.

    scaling: of the wavelengths; None for no scaling. The buffers `cos` and `sin` (max_seq_len, head_dim), as in
    RotaryTables, are undefined until `init_buffers`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_seq_len: int, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.max_seq_len = max_seq_len
        self.theta = theta
        self.scaling = scaling
        self.register_buffer("cos", torch.empty(max_seq_len, head_dim), persistent=False)
        self.register_buffer("sin", torch.empty(max_seq_len, head_dim), persistent=False)

    def init_buffers(self, device: torch.device, dtype: torch.dtype) -> None:
        """Compute the tables in float64 on the CPU (same on every device); store them as `dtype` on `device`."""
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device="cpu") / self.head_dim
        inv_freq = self.theta**-exponent
        inv_freq = inv_freq if self.scaling is None else self.scaling.apply(inv_freq)
        positions = torch.arange(self.max_seq_len, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, inv_freq)
        factor = 1.0 if self.scaling is None else self.scaling.table_factor
        cos, sin = angles.cos() * factor, angles.sin() * factor
        self.cos = torch.cat((cos, cos), dim=-1).to(device=device, dtype=dtype)
        self.sin = torch.cat((-sin, sin), dim=-1).to(device=device, dtype=dtype)

    def forward(self, positions: Tensor | None) -> RotaryTables:
        """Tables for `positions`, int64 (batch, seq_len), each below max_seq_len; None: 0, 1, 2, … in every row."""
        if positions is None:
            return RotaryTables(self.cos, self.sin)
        return RotaryTables(self.cos[positions], self.sin[positions])


def adopt_rotary_(model: nn.Module, source: nn.Module) -> bool:
    """Give the rotary embeddings of `model` the wavelengths of those of `source`, which have the same names, and its
    attention the factors of queries, which may depend on them; returns whether there are any, and all of them have one
    there. source: its tables may be undefined."""
    own, others = (
        {name: module for name, module in each.named_modules() if isinstance(module, RotaryEmbedding)}
        for each in (model, source)
    )
    if not own or not own.keys() <= others.keys():
        return False
    for name, rope in own.items():
        if (rope.theta, rope.scaling) != (others[name].theta, others[name].scaling):
            rope.theta, rope.scaling = others[name].theta, others[name].scaling
            rope.init_buffers(rope.cos.device, rope.cos.dtype)
    factors = {name: module.query_factor for name, module in source.named_modules() if hasattr(module, "query_factor")}
    for name, module in model.named_modules():
        if name in factors:
            module.query_factor = factors[name]
    return True


class HeadAttention(Mixer):
    """Causal self-attention of heads: `attended` of what `heads` computes, which are those of a subclass.

    head_dim: width of queries and keys.
    query_factor: of all queries.
    attend: the attention function, by default that of models/attention.py, which the core calls with (batch, heads,
    seq_len, width). A family may have its own, as a method of a subclass or an attribute.
    """

    attend: Kernel
    gathered = (1, 2)
    watch = staticmethod(watch)

    def __init__(self, head_dim: int, query_factor: float = 1.0) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.query_factor = query_factor
        if not hasattr(type(self), "attend"):  # else a method of a subclass
            self.attend = attend

    def core(self, inputs: Sequence[Tensor], seen: AttentionMask | None, by_head: Mapping[str, Tensor]) -> Tensor:
        heads = (x.transpose(1, 2) for x in inputs)
        return self.attend(*heads, seen, **by_head, **self.options).transpose(1, 2)

    @property
    def options(self) -> dict[str, Any]:
        """Those of `attend` that are other than by default."""
        return {"window": self.window} if self.window else {}

    @property
    def has_cache(self) -> bool:
        return super().has_cache and self.attend is attend

    def cache(self, reading: Reading) -> Cache:
        return KeyValueCache(reading, **self.options)

    def forward(self, x: Tensor, rope: RotaryTables, mask: AttentionMask | None) -> Tensor:
        """x: (batch, seq_len, dim); mask: from attention_mask, None: causal. Returns (batch, seq_len, dim)."""
        return self.attended(*self.heads(x, rope), mask)

    def heads(self, x: Tensor, rope: RotaryTables) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x: (batch, seq_len, heads, width) each."""
        raise NotImplementedError

    def attended(self, queries: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask | None) -> Tensor:
        """The output, (batch, seq_len, dim), from the `heads`."""
        raise NotImplementedError


class Attention(HeadAttention):
    """Attention in which n_heads / n_kv_heads query heads share one key/value head (GQA).

    The number of heads comes from the projections' outputs, not from the configuration: if tensor parallelism shards
    the projections by heads, each rank computes its own heads.

    bias: whether wq, wk and wv have biases; output_bias: whether wo has one. sinks: whether each head has a learned
    sink, see `attend`. rotates: whether queries and keys are rotated by their positions. window:
    number of positions that each one sees, its own included; 0: all up to its own. cap: of the scores, see `attend`.
    q_norm, k_norm: normalize queries and keys, (batch, seq_len, heads, head_dim), before they are rotated: each head by
    an RMSNorm of width head_dim, or all heads together by a WideNorm. None: not normalized.
    largest: with `note_largest`, the largest score of each head since it was last filled, in train mode.
    """

    largest: Tensor | None
    gathers = True

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        *,
        bias: bool = False,
        output_bias: bool = False,
        sinks: bool = False,
        rotates: bool = True,
        window: int = 0,
        query_factor: float = 1.0,
        cap: float = 0.0,
    ) -> None:
        super().__init__(head_dim, query_factor)
        self.rotates = rotates
        self.window = window
        self.cap = cap
        self.wq = Column(dim, n_heads * head_dim, bias=bias)
        self.wk = Column(dim, n_kv_heads * head_dim, bias=bias)
        self.wv = Column(dim, n_kv_heads * head_dim, bias=bias)
        self.wo = Row(n_heads * head_dim, dim, bias=output_bias)
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.sinks = OfHeads(n_heads) if sinks else None
        self.register_buffer("largest", None)

    def note_largest(self, n_heads: int) -> None:
        """Let the training's forward passes note the largest scores of this rank's heads, n_heads."""
        dtype = torch.promote_types(self.wq.weight.dtype, torch.float32)
        self.register_buffer("largest", torch.empty(n_heads, dtype=dtype, device="meta"), persistent=False)

    def heads(self, x: Tensor, rope: RotaryTables) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normalized and rotated, and values of x: (batch, seq_len, heads, head_dim) each."""
        batch, seq_len, _ = x.shape
        queries = self.wq(x).view(batch, seq_len, -1, self.head_dim)
        keys = self.wk(x).view(batch, seq_len, -1, self.head_dim)
        values = self.wv(x).view(batch, seq_len, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        if self.rotates:
            queries, keys = rope.rotate(queries), rope.rotate(keys)
        return queries if self.query_factor == 1 else queries * self.query_factor, keys, values

    def attended(self, queries: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask | None) -> Tensor:
        out: Tensor = self.wo(self.results(queries, keys, values, mask))
        return out

    def results(self, queries: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask | None) -> Tensor:
        """Those of all heads, (batch, seq_len, heads x head_dim)."""
        by_head = {} if self.sinks is None else {"sinks": self.sinks()}
        if self.largest is not None and self.training:
            by_head["largest"] = self.largest
        return self.core((queries, keys, values), mask, by_head).flatten(2)

    @property
    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = {"window": self.window} if self.window else {}
        return {**found, "cap": self.cap} if self.cap else found


class GatedAttention(Attention):
    """Attention whose results are multiplied by sigmoid(wg x). Arguments: those of Attention."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, *others: Any, **options: Any) -> None:
        super().__init__(dim, n_heads, n_kv_heads, head_dim, *others, **options)
        self.wg = Column(dim, n_heads * head_dim, bias=False)

    def forward(self, x: Tensor, rope: RotaryTables, mask: AttentionMask | None) -> Tensor:
        out: Tensor = self.wo(self.results(*self.heads(x, rope), mask) * self.wg(x).sigmoid())
        return out


class FeedForward(nn.Module):
    """Gated linear unit (Shazeer, "GLU Variants Improve Transformer", 2020): w2(activation(w1 x) * w3 x); by default
    SwiGLU. is_shared: whether it is that of shared experts, whose mixture gathers its input and sums its output."""

    watch = staticmethod(watch)

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        activation: Callable[[Tensor], Tensor] = functional.silu,
        *,
        is_shared: bool = False,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gathers = not is_shared
        self.w1 = Column(dim, hidden_dim, bias=False)
        self.w2 = (RowPart if is_shared else Row)(hidden_dim, dim, bias=False)
        self.w3 = Column(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seq_len, dim). Returns the same shape."""
        out: Tensor = self.w2(gated(self.activation, self.w1(x), self.w3(x)))
        return out


class WholeRows(nn.Module):
    """The identity. With tensor parallelism, its inputs have a part of the positions, and its outputs all."""

    def forward(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """parts: (batch, seq_len, …) each."""
        return parts


class Scalar(nn.Module):
    """Learned numbers that a forward pass reads by a call, (n,): FSDP cannot shard a parameter without dimensions."""

    def __init__(self, n: int = 1, role: Role = VECTOR) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n))
        self.roles: Roles = {"weight": role}

    def forward(self) -> Tensor:
        return self.weight


class OfHeads(Scalar):
    """Numbers of each head, which tensor parallelism shards by heads."""
