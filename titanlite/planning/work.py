"""List the work of a decoder on one rank: matrix products, attention, bytes of elementwise operations, operations.

The bytes are those of the operations that titanlite issues, each reading its inputs and writing its outputs once:
models/layers.py, models/head.py, models/experts.py and parallel/tensor.py. Compiled blocks read and write only what
their products, attention and collectives exchange. tests/unit/planning/test_work.py compares both with real passes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from titanlite.models.capped_attention import BLOCK_SCORES
from titanlite.models.delta_rule import CHUNK
from titanlite.models.family import DecoderConfig
from titanlite.planning.activations import BlockKind, Features, MicrobatchShape, heads_of


@dataclass(frozen=True)
class Product:
    """(m, k) @ (k, n), `count` times; is_wide: in promote_types(compute dtype, float32); is_float8: by the matrix unit,
    of operands in float8."""

    m: int
    k: int
    n: int
    count: int = 1
    is_wide: bool = False
    is_float8: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n * self.count


ROUNDING = 24
"""How often the emulation reads or writes an element of an operand to round it to float8."""


@dataclass(frozen=True)
class Attention:
    """Causal attention of `rows` rows x heads, each of seq_len positions: T x T products, as MFU counts them."""

    rows: int
    seq_len: int
    head_dim: int
    is_backward: bool

    @property
    def flops(self) -> int:
        return 4 * self.rows * self.seq_len**2 * self.head_dim * (2 if self.is_backward else 1)


@dataclass(frozen=True)
class Work:
    """moved: bytes that elementwise operations read and write. operations: how many are issued, of all kinds."""

    products: tuple[Product, ...] = ()
    attention: tuple[Attention, ...] = ()
    moved: float = 0
    operations: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.products + other.products,
            self.attention + other.attention,
            self.moved + other.moved,
            self.operations + other.operations,
        )

    @property
    def flops(self) -> int:
        return sum(part.flops for part in self.products) + sum(part.flops for part in self.attention)


@dataclass(frozen=True)
class PassWork:
    """The work of a microbatch in one unit: forward, and the gradients of its input and of its parameters.

    again: computed again by each call of backward, of which a split backward pass has two.
    """

    forward: Work
    input_gradient: Work
    weight_gradient: Work
    again: Work = Work()


class Float8Products(NamedTuple):
    """How the linear layers of blocks multiply, see models/float8.py. on_device: by its matrix unit, but experts.
    of_tokens: also for the gradients of weights, but of experts."""

    on_device: bool
    of_tokens: bool


@dataclass(frozen=True)
class Elementwise:
    """Bytes and operations of the elementwise parts of a decoder. size: bytes of the compute dtype; wide: of
    promote_types(compute dtype, float32). float8: None: linear layers multiply in the compute dtype."""

    size: int
    wide: int
    on_cpu: bool
    compiled: bool
    float8: Float8Products | None = None

    def linear(self, m: int, k: int, n: int, count: int = 1, *, of_experts: bool = False) -> PassWork:
        """`count` linear layers of a block, from k to n features of m rows."""
        plain = linear_work(m, k, n, count)
        if self.float8 is None:
            return plain
        rounded = partial(self._in_float8, on_device=self.float8.on_device and not of_experts)
        of_tokens = self.float8.of_tokens and not of_experts
        weights = rounded(plain.weight_gradient) if of_tokens else plain.weight_gradient
        return PassWork(rounded(plain.forward), rounded(plain.input_gradient), weights)

    def _in_float8(self, work: Work, *, on_device: bool) -> Work:
        """The product and the rounding of its operands."""
        (product,) = work.products
        casts = self.size != self.wide
        elements = product.count * product.k * (product.m + product.n)
        if on_device:
            # magnitudes and their maximum; the wide operand, divided, clamped and cast
            moved = elements * (3 * self.size + (self.size + self.wide) * casts + 5 * self.wide + 1)
            return Work((replace(product, is_float8=True),), moved=moved, operations=product.count * 16)
        results = product.count * product.m * product.n * (self.size + self.wide) * casts
        moved = elements * (ROUNDING * self.wide + (self.size + self.wide) * casts) + results
        return Work((replace(product, is_wide=True),), moved=moved, operations=product.count * (2 * 28 + 1 + casts))

    def norm(self, elements: float) -> tuple[Work, Work]:
        """(forward, backward) of an RMSNorm."""
        size, wide, casts = self.size, self.wide, (self.size + self.wide) * (self.size != self.wide)
        if self.compiled:  # one read is that of the residual sum, see block_work
            return Work(moved=elements * size, operations=1), Work(moved=elements * 3 * size, operations=1)
        if not self.on_cpu:
            return Work(moved=elements * 2 * size, operations=1), Work(moved=elements * 3 * size, operations=2)
        forward, backward = 2 * size + 3 * wide + casts, 2 * size + 12 * wide + 3 * casts
        return Work(moved=elements * forward, operations=8), Work(moved=elements * backward, operations=11)

    def rotation(self, elements: float) -> tuple[Work, Work]:
        """(forward, backward) of the rotary embedding of queries and keys."""
        if self.compiled:
            work = Work(moved=elements * 2 * self.size, operations=1)
            return work, work
        casts = 2 * (self.size + self.wide) * (self.size != self.wide)
        moved = elements * (3 * self.size + 4 * self.wide + casts)
        return Work(moved=moved, operations=3), Work(moved=moved, operations=4)

    def swiglu(self, elements: float, *, clamped: bool = False) -> tuple[Work, Work]:
        """(forward, backward) of silu(a) * b, or of experts.clamped_swiglu."""
        each = elements * self.size
        if self.compiled:
            return Work(moved=3 * each, operations=1), Work(moved=6 * each, operations=1)
        if clamped:
            return Work(moved=15 * each, operations=7), Work(moved=22 * each, operations=11)
        return Work(moved=5 * each, operations=2), Work(moved=11 * each, operations=4)

    def sums(self, elements: float, count: int) -> Work:
        """`count` sums of two tensors each. Compiled, the one that comes last is written only once."""
        return Work(moved=count * elements * (2 if self.compiled else 3) * self.size, operations=count)

    def copies(self, elements: float, count: int = 1) -> Work:
        return Work(moved=count * elements * 2 * self.size, operations=count)


def linear_work(m: int, k: int, n: int, count: int = 1, is_wide: bool = False) -> PassWork:
    """`count` linear layers from k to n features of m rows."""
    return PassWork(
        Work((Product(m, k, n, count, is_wide),), operations=count),
        Work((Product(m, n, k, count, is_wide),), operations=count),
        Work((Product(n, m, k, count, is_wide),), operations=count),
    )


def total(parts: Iterable[PassWork]) -> PassWork:
    """The sum of the parts, pass by pass."""
    forward, input_gradient, weight_gradient, again = Work(), Work(), Work(), Work()
    for part in parts:
        forward += part.forward
        input_gradient += part.input_gradient
        weight_gradient += part.weight_gradient
        again += part.again
    return PassWork(forward, input_gradient, weight_gradient, again)


def elementwise_work(forward: Work, backward: Work) -> PassWork:
    return PassWork(forward, backward, Work())


def block_work(
    config: DecoderConfig, features: Features, shape: MicrobatchShape, ep: int, ops: Elementwise, kind: BlockKind
) -> PassWork:
    """The work of one transformer block, without its collectives."""
    window = kind.window
    tp, dim = shape.tp, config.dim
    positions = shape.positions
    residual, gathered = positions * dim / tp, positions * dim
    query_dim, kv_dim = config.n_heads * config.head_dim // tp, config.n_kv_heads * config.head_dim // tp
    queries, keys = positions * query_dim, positions * kv_dim
    rotated = config.rotary_dim / config.head_dim
    parts = [
        *(elementwise_work(*ops.norm(residual)) for _ in range(features.norms)),
        elementwise_work(ops.sums(residual, 2), ops.sums(residual, 2)),
    ]
    if kind.is_linear:
        parts += _linear_attention(config, shape, ops)
    elif features.is_latent:
        parts += _latent_projections(config, shape, ops)
    else:
        parts += [
            ops.linear(positions, dim, query_dim),
            ops.linear(positions, dim, kv_dim, count=2),
            ops.linear(positions, query_dim, dim),
            elementwise_work(*ops.rotation(queries * rotated)),
            elementwise_work(*ops.rotation(keys * rotated)),
            # of the inputs of wq, wk and wv
            elementwise_work(Work(), ops.sums(gathered, 2)),
        ]
    if not kind.is_linear:
        parts.append(_attention(config, shape, window))
    if config.linear_key_heads and not kind.is_linear:
        heads = queries + keys
        parts += [
            ops.linear(positions, dim, query_dim),
            elementwise_work(*ops.swiglu(queries)),
            # rotated parts are put together with the rest; of the input of wg
            elementwise_work(ops.copies(heads), ops.copies(heads, 3) + ops.sums(gathered, 1)),
        ]
    if not kind.is_linear and (features.head_norms or features.wide_norms):
        parts += [elementwise_work(*ops.norm(queries)), elementwise_work(*ops.norm(keys))]
    if shape.uses_bands(config, window):
        others = 1 - window / shape.seq_len  # of the bands after the first one
        forward = ops.copies(queries, 2) + ops.copies(others * queries, 2) + ops.copies(others * keys, 8)
        parts.append(elementwise_work(forward, ops.copies(queries, 4) + ops.copies(keys, 13)))
    if features.sinks:
        # the results without the sink, scaled, and the product with their gradients
        parts.append(elementwise_work(ops.copies(queries), ops.copies(queries, 2)))
    if tp > 1:  # two gathers and two scatters, each with a copy
        parts.append(elementwise_work(ops.copies(gathered, 4), ops.copies(gathered, 4)))
    if config.n_experts > 1 and not kind.is_dense:
        parts += _experts(config, shape, ep, ops)
        if config.n_shared_experts:
            hidden = config.n_shared_experts * config.ffn_dim // tp
            parts += _feed_forward(positions, dim, hidden, ops)
            if config.gates_shared:
                parts.append(linear_work(positions, dim, 1, is_wide=True))
                each = ops.copies(positions * hidden, 1)
                parts.append(elementwise_work(each, each + ops.sums(positions * hidden, 1) + ops.sums(gathered, 1)))
            parts.append(elementwise_work(ops.sums(gathered, 1), ops.sums(gathered, 1)))
    else:
        parts += _feed_forward(positions, dim, (config.dense_ffn_dim if kind.is_dense else config.ffn_dim) // tp, ops)
    if kind.is_further:
        parts += [elementwise_work(*ops.norm(residual)) for _ in range(3)]
        parts += [ops.linear(positions // tp, 2 * dim, dim), elementwise_work(ops.copies(2 * residual), Work())]
    return total(parts)


def _feed_forward(positions: int, dim: int, hidden: int, ops: Elementwise) -> list[PassWork]:
    return [
        ops.linear(positions, dim, hidden, count=2),
        ops.linear(positions, hidden, dim),
        elementwise_work(*ops.swiglu(positions * hidden)),
        elementwise_work(Work(), ops.sums(positions * dim, 1)),
    ]


def _latent_projections(config: Any, shape: MicrobatchShape, ops: Elementwise) -> list[PassWork]:
    """Those of latent attention, with the rotation of the parts of queries and keys that are rotated."""
    positions, tp, dim = shape.positions, shape.tp, config.dim
    own, n_heads, rotated = positions // tp, config.n_heads // tp, config.qk_rope_head_dim
    queries, values = positions * n_heads * config.head_dim, positions * n_heads * config.value_dim
    q_rank, kv_rank = config.q_lora_rank, config.kv_lora_rank
    parts = [
        ops.linear(positions, q_rank or dim, n_heads * config.head_dim),
        ops.linear(own, dim, kv_rank + rotated),
        ops.linear(positions, kv_rank, n_heads * (config.qk_nope_head_dim + config.value_dim)),
        ops.linear(positions, n_heads * config.value_dim, dim),
        elementwise_work(*ops.norm(own * kv_rank)),
        elementwise_work(*ops.rotation(positions * (n_heads + 1) * rotated)),
        # queries and keys are put together of their parts, values are padded and cut again
        elementwise_work(ops.copies(2 * queries + 2 * values, 1), ops.copies(3 * queries + 3 * values, 1)),
        elementwise_work(Work(), ops.sums(own * dim, 1)),
    ]
    if q_rank:
        parts += [ops.linear(own, dim, q_rank), elementwise_work(*ops.norm(own * q_rank))]
    return parts


def _linear_attention(config: DecoderConfig, shape: MicrobatchShape, ops: Elementwise) -> list[PassWork]:
    """Gated linear attention: projections, convolutions in the wide dtype, gates, and the rule, as attention of as many
    operations within chunks."""
    positions, tp, dim, wide = shape.positions, shape.tp, config.dim, ops.wide
    key_dim, value_dim, heads = config.linear_key_dim, config.linear_value_dim, config.linear_value_heads // tp
    keys, values = config.linear_key_heads * key_dim // tp, heads * value_dim
    convolved = positions * (2 * keys + values)
    of_chunk = CHUNK * (5 * key_dim + 3 * value_dim) + 6 * key_dim * value_dim  # operations per position and head
    rows = max(positions * heads * of_chunk // (4 * CHUNK**2 * key_dim), 1)
    forward, backward = (Attention(rows, CHUNK, key_dim, is_backward) for is_backward in (False, True))
    return [
        ops.linear(positions, dim, keys, count=2),
        ops.linear(positions, dim, values, count=2),
        ops.linear(positions, dim, heads, count=2),
        ops.linear(positions, values, dim),
        PassWork(Work(attention=(forward,), operations=1), Work(attention=(backward,), operations=1), Work()),
        elementwise_work(
            Work(moved=13 * convolved * wide, operations=15), Work(moved=53 * convolved * wide, operations=70)
        ),
        elementwise_work(*ops.norm(positions * values)),
        elementwise_work(*ops.swiglu(positions * values)),
        elementwise_work(Work(operations=8), Work(operations=12)),
        elementwise_work(Work(), ops.sums(positions * dim, 5)),
    ]


def _attention(config: DecoderConfig, shape: MicrobatchShape, window: int) -> PassWork:
    """With cp, a rank has entire rows of 1 / cp of the heads, or 1 / cp of the positions of all heads. These see all
    keys through a mask of scores, also with a window."""
    rows = max(shape.rows * config.n_heads // shape.tp // shape.cp, 1)
    seq_len = shape.seq_len
    if window and not (shape.gathers_keys and shape.mask == "scores"):
        # each band of queries with its own keys and those of the band before
        rows, seq_len = 4 * rows * -(-seq_len // window), window
    forward, backward = (Attention(rows, seq_len, config.head_dim, is_backward) for is_backward in (False, True))
    return PassWork(Work(attention=(forward,), operations=1), Work(attention=(backward,), operations=1), Work())


def noted_scores(config: DecoderConfig, shape: MicrobatchShape, window: int, ops: Elementwise) -> Work:
    """The scores that QK-clip computes once more in a forward pass of attention, in blocks of queries, with the sum of
    scores and mask and the maximum. Not repeated by recomputation."""
    rows = max(shape.rows * config.n_heads // shape.tp // shape.cp, 1)
    size = min(max(BLOCK_SCORES // (rows * shape.seq_len), 1), shape.seq_len)
    blocks = -(-shape.seq_len // size)
    seen = min(window + size if window else (shape.seq_len + size) // 2, shape.seq_len)  # keys of a block, on average
    return Work(
        (Product(size, config.head_dim, seen, rows * blocks, is_wide=True),),
        moved=3 * rows * blocks * size * seen * ops.wide,
        operations=8 * blocks,
    )


def _experts(config: DecoderConfig, shape: MicrobatchShape, ep: int, ops: Elementwise) -> list[PassWork]:
    """A mixture of experts, each chosen equally often."""
    positions = shape.positions
    dim, hidden = config.dim, config.ffn_dim // shape.tp
    choices = positions * config.n_active_experts
    own = config.n_experts // ep
    of_expert = max(choices // own, 1)
    rows = choices * dim
    moved = (6 * rows + 2 * positions * dim) * ops.size + 3 * rows * ops.wide
    # gradients by expert and by position, of the weights, and of the inputs of w1, w3 and the router; the experts'
    # parts of the gradients of their weights are put together
    again = (15 * rows + 4 * positions * dim) * ops.size + 7 * rows * ops.wide + 6 * own * dim * hidden * ops.size
    if ops.compiled:  # permutations and casts are parts of what reads them
        moved, again = (3 * rows + positions * dim) * ops.size, (6 * rows + 3 * positions * dim) * ops.size
    return [
        linear_work(positions, dim, config.n_experts, is_wide=True),
        ops.linear(of_expert, dim, hidden, count=2 * own, of_experts=True),
        ops.linear(of_expert, hidden, dim, count=own, of_experts=True),
        elementwise_work(*(_times(part, own) for part in ops.swiglu(of_expert * hidden, clamped=config.clamped))),
        # forward: rows by expert, results in one tensor and by position, weighted and added up
        elementwise_work(Work(moved=moved, operations=40), Work(moved=again, operations=60)),
    ]


def _times(work: Work, count: int) -> Work:
    return Work(work.products * count, work.attention * count, work.moved * count, work.operations * count)


def embedding_work(config: DecoderConfig, shape: MicrobatchShape, ops: Elementwise) -> PassWork:
    """The embedding of a microbatch. Its gradient is a tensor of the size of the weight."""
    positions = shape.positions
    own_ids = -(-config.vocab_size // shape.tp)
    found, copies = positions * config.dim * ops.size, 3 if shape.tp > 1 else 0
    return PassWork(
        Work(moved=(2 + 2 * copies) * found, operations=1 + 2 * copies),
        Work(),
        Work(moved=own_ids * config.dim * ops.size + 3 * found, operations=2),
    )


def head_work(config: DecoderConfig, shape: MicrobatchShape, ops: Elementwise) -> PassWork:
    """The last norm and the loss. Unless the logits are computed again, forward computes the gradients, too."""
    positions, dim = shape.positions, config.dim
    own_ids = -(-config.vocab_size // shape.tp)
    columns = own_ids if shape.shard_logits else config.vocab_size
    chunk = min(shape.loss_chunk, positions)
    chunks = -(-positions // chunk)
    logits = positions * columns
    casts = (ops.size + ops.wide) * (ops.size != ops.wide)
    scores = Work(
        (Product(chunk, dim, own_ids, chunks),),
        moved=logits * ((3 if ops.compiled else 6) * ops.wide + casts),
        operations=20 * chunks,
    )
    differences = Work(moved=logits * casts, operations=8 * chunks)
    of_x = Work((Product(chunk, own_ids, dim, chunks),), moved=4 * positions * dim * ops.size, operations=3 * chunks)
    weight = own_ids * dim
    # the sum over the chunks is read and written for each
    moved = 2 * chunks * weight * ops.wide + 3 * positions * dim * ops.size + 2 * weight * ops.size
    of_weight = Work((Product(own_ids, chunk, dim, chunks),), moved=moved, operations=2 * chunks)
    norm_forward, norm_backward = ops.norm(positions * dim / shape.tp)
    copies = ops.copies(positions * dim) if shape.tp > 1 else Work()
    norm = elementwise_work(norm_forward + copies, norm_backward + copies)
    if shape.recomputes_logits:
        loss = PassWork(scores, of_x, of_weight, scores + differences)
    else:
        last = Work(moved=2 * (positions * dim + weight) * ops.size, operations=8)
        loss = PassWork(scores + differences + of_x + of_weight, last, Work())
    return total([norm, *[loss] * heads_of(config)])
