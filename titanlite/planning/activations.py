"""Compute the activation memory of a decoder's microbatch between its forward and its backward pass, analytically."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from titanlite.models.attention import MaskForm
from titanlite.models.delta_rule import CHUNK, SEGMENT
from titanlite.models.family import DecoderConfig, LanguageModel, Structure
from titanlite.models.head import PART_IDS
from titanlite.models.layers import Attention, RMSNorm, WholeRows, WideNorm


class Features(NamedTuple):
    """What the blocks of a model have. norms: of the residual stream, in each block. head_norms: of queries and keys,
    head by head. wide_norms: of those of all heads together."""

    norms: int
    is_latent: bool
    head_norms: bool
    wide_norms: bool
    sinks: bool


def features_of(model: LanguageModel, structure: Structure) -> Features:
    """Those of a full model."""
    blocks = [model.get_submodule(name) for name in structure.blocks]
    modules = [module for block in blocks for module in block.modules()]
    attentions = [module for module in modules if isinstance(module, Attention)]
    normed = [attention.q_norm for attention in attentions if attention.q_norm is not None]
    return Features(
        norms=sum(isinstance(child, RMSNorm) for child in blocks[0].children()),
        is_latent=any(isinstance(module, WholeRows) for module in modules),
        head_norms=any(not isinstance(norm, WideNorm) for norm in normed),
        wide_norms=any(isinstance(norm, WideNorm) for norm in normed),
        sinks=any(attention.sinks is not None for attention in attentions),
    )


class BlockKind(NamedTuple):
    """What decides the work and the memory of a block. window: of its attention; 0: none, or one of an entire row.
    is_dense: whether it has one feed-forward layer in a model with experts. is_linear: whether it has gated linear
    attention. is_further: whether it predicts further tokens."""

    window: int
    is_dense: bool = False
    is_linear: bool = False
    is_further: bool = False


@dataclass(frozen=True)
class MicrobatchShape:
    """One microbatch on one of cp x tp ranks: rows x seq_len / cp positions, in a compute dtype of `element_bytes`,
    attention in one of `attention_bytes`.

    loss_chunk: positions whose logits exist at the same time. shard_logits: whether each rank has the logits of its
    part of the vocabulary only. recomputes_logits: see LossComputation.recomputes. mask: the form of the mask; None:
    causal. gathers_keys: whether each of the cp ranks attends to gathered keys and values, instead of exchanging
    positions for heads. extra_logits: of a registered loss, see models/losses.py; None for the cross-entropy.
    rounded_bytes: of operands in float8, in the backward pass of a layer. emulates_float8: whether products of blocks
    have results in the wide dtype, before a cast. form: of masks on the device, also of those that windows, sinks and
    caps need without a mask. compiled: whether blocks are compiled.
    """

    rows: int
    seq_len: int
    cp: int
    tp: int
    element_bytes: int
    attention_bytes: int
    loss_chunk: int
    shard_logits: bool
    recomputes_logits: bool
    mask: MaskForm | None = None
    gathers_keys: bool = False
    extra_logits: float | None = None
    rounded_bytes: int = 0
    emulates_float8: bool = False
    form: MaskForm = "scores"
    compiled: bool = False

    @property
    def positions(self) -> int:
        """Of one rank."""
        return self.rows * self.seq_len // self.cp

    def kinds(self, config: DecoderConfig) -> tuple[BlockKind, ...]:
        """That of each layer."""
        return tuple(
            BlockKind(
                *(window if window < self.seq_len else 0, index < config.n_dense_layers, is_linear),
                is_further=index >= config.n_layers,
            )
            for index, (window, is_linear) in enumerate(zip(config.windows, config.linear_layers, strict=True))
        )

    def uses_bands(self, config: DecoderConfig, window: int) -> bool:
        """Whether attention with this window computes bands, for which it copies keys and values. With a cap of the
        scores, it does not."""
        has_kernel = self.form == "blocks" or config.score_cap > 0
        return window > 0 and not has_kernel and not self.gathers_keys

    def uses_blocks(self, config: DecoderConfig, window: int, *, sinks: bool) -> bool:
        """Whether FlexAttention computes attention with this window."""
        return self.form == "blocks" and (self.mask is not None or window > 0 or sinks or config.score_cap > 0)


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes on one rank that a microbatch keeps until its backward pass, by owner.

    blocks: each transformer block; blocks_by_op: with the recompute policy "op"; block_input: one with full
    recomputation. block_backward: additional memory of the backward pass of one block. block_split: gradients that wait
    for those of weights if the backward pass is split. embedding, head: first and last FSDP unit.
    loss: additional memory while the head computes the loss, or its gradients.
    tables: of the positions of documents, shared by all blocks of a stage. masks: by window, shared by the blocks with
    it. windows: of the blocks.
    """

    blocks: tuple[int, ...]
    blocks_by_op: tuple[int, ...]
    block_input: int
    block_backward: int
    block_split: int
    embedding: int
    head: int
    loss: int
    tables: int
    masks: Mapping[int, int]
    windows: tuple[int, ...]

    def documents(self, blocks: Iterable[int]) -> int:
        """Bytes of masks and positions for these blocks of a stage."""
        return self.tables + sum(self.masks[window] for window in {self.windows[block] for block in blocks})


def activation_bytes(config: DecoderConfig, features: Features, shape: MicrobatchShape) -> ActivationBytes:
    """Count the saved bytes of the model's forward pass, operation by operation. docs/planning.md has the error.

    With tensor parallelism the residual stream is sharded along the sequence, the inside of attention and feed-forward
    by heads and features. The inputs of the column layers are gathered, so each rank has them in full. The selective
    policy "op" also keeps the unreduced outputs of the row layers, which have full size too.
    """
    positions, tp, size = shape.positions, shape.tp, shape.element_bytes
    exchanges_heads = shape.cp > 1 and not shape.gathers_keys
    # During attention, a rank has entire rows of 1 / cp of the heads, at least one of keys and values, or entire rows
    # of keys and values.
    n_kv_heads = max(config.n_kv_heads, shape.cp * tp) if exchanges_heads else config.n_kv_heads
    rows_of_keys = shape.cp if shape.gathers_keys else 1
    query_dim, kv_dim = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    wide = max(size, 4)  # bytes per element of the operations in at least float32
    residual = positions * config.dim * size // tp
    gathered = positions * config.dim * size
    latent = features.is_latent
    projected = _latent_products(config) if latent else query_dim + 2 * kv_dim  # queries, keys, values
    heads = positions * projected * size // tp
    attended = positions * query_dim * size // tp
    # copies in a wider dtype: saved in place of queries, keys and values, and beside the result, as after an exchange
    wider = shape.attention_bytes / size
    kinds = shape.kinds(config)

    def saved_inputs(window: int) -> int:
        """Those that "op" keeps with the result of a compiled FlexAttention, except values that a product gave."""
        if shape.compiled or not shape.uses_blocks(config, window, sinks=features.sinks):
            return 0
        of_keys = rows_of_keys * n_kv_heads * config.head_dim
        return positions * (query_dim + (2 if shape.cp > 1 else 1) * of_keys) * size // tp

    def attention(window: int) -> int:
        queries, keys, band = 1.0, 1.0, 0
        if shape.uses_bands(
            config, window
        ):  # each band has copies of its queries, of its keys and of those of the band before
            later = 1 - window / shape.seq_len  # of the bands after the first one
            queries, keys = (1 + later, 1 + 2 * later) if shape.mask is None else (1.0, 2.0)
            band = 2 * window**2 * shape.attention_bytes if shape.mask is None else 0
        inputs = positions * (queries * query_dim + 2 * keys * rows_of_keys * n_kv_heads * config.head_dim) * size / tp
        is_copied = wider > 1 or exchanges_heads or shape.uses_bands(config, window)
        # narrower values, of whose result the padding is cut off
        cut = positions * config.n_heads * config.value_dim * size // tp if config.value_dim < config.head_dim else 0
        return int(inputs * wider) + attended + (int(attended * wider) if is_copied else 0) + cut + band

    logsumexp = positions * config.n_heads * wide // tp
    n_active = config.n_active_experts
    n_used = n_active + config.n_shared_experts
    sparse = n_used * positions * config.ffn_dim * size // tp
    dense = positions * config.dense_ffn_dim * size // tp
    hidden = max(sparse, dense)
    norm = _norm_bytes(config.dim, positions // tp, size, wide)
    head_norm = 0
    if features.head_norms:
        head_norm = _norm_bytes(config.head_dim, positions * (config.n_heads + config.n_kv_heads) // tp, size, wide)
    if features.wide_norms:
        head_norm = sum(_norm_bytes(dim // tp, positions, size, wide) for dim in (query_dim, kv_dim))
    if latent:
        head_norm = _latent_bytes(config, positions, tp, size, wide)
    # of wo and w2, before and after the reduction
    n_outputs = 1 + n_active + (config.n_shared_experts > 0)
    scattered = residual if tp > 1 else 0
    sparse_outputs = n_outputs * gathered + 2 * scattered
    dense_outputs = 2 * (gathered + scattered)
    has_experts = config.n_experts > 1
    # probabilities; of a sigmoid also scores and probabilities that add up to 1
    scores = positions * config.n_experts * wide * (3 if config.scoring == "sigmoid" else 1) if has_experts else 0
    # the rows by expert, their results by position in the wide dtype; per choice three indexes and two weights
    routed = n_active * positions * (config.dim * (size + wide) + 3 * 8 + 2 * wide) if has_experts else 0
    wide_input = positions * config.dim * wide if has_experts and wide != size else 0
    own_ids = -(-config.vocab_size // tp)
    columns = own_ids if shape.shard_logits else config.vocab_size
    # logits in the wide dtype and, if it differs, logits and their gradients in the compute dtype
    tokens = min(shape.loss_chunk, positions)
    caps = wide if config.logit_cap else 0  # hyperbolic tangents
    chunk = tokens * columns * (caps + (wide if wide == size else wide + 2 * size))
    if shape.extra_logits is not None:  # beside the own logits, those of all ids, if they are another tensor
        full = shape.extra_logits + (wide != size or tp > 1)
        chunk = tokens * (own_ids * size + int(full * config.vocab_size * wide))
    if wide != size:  # the gradient of the head's weight: added up in the wide dtype in parts, at the end in both
        part = min(PART_IDS, own_ids) * config.dim * (size + wide)
        chunk = max(chunk + part + own_ids * config.dim * (wide - size), own_ids * config.dim * wide)
    head_gradients = gathered + own_ids * config.dim * size
    # the norms, the inputs of wq, wk, wv and of w1, w3, and of SwiGLU: both inputs, and the product; of the clamped one
    # also silu, its clamped input, and the other factor
    kept = 6 if config.clamped else 3
    gate = positions * wide if config.gates_shared else 0
    of_experts = kept * sparse + scores + gate + routed + wide_input
    if config.linear_key_heads:  # the factor of the results of full attention, and their product
        head_norm += 2 * positions * query_dim * size // tp
        heads += positions * query_dim * size // tp
    of_feed_forward = (of_experts if has_experts else kept * sparse) + norm + gathered
    inputs = features.norms * norm + (residual if latent and tp > 1 else gathered) + gathered
    linear, linear_by_op = _linear_bytes(config, shape, wide)
    full = head_norm + logsumexp
    by_kind = {
        kind: inputs
        + kind.is_further * (3 * norm + 3 * residual)
        + (linear if kind.is_linear else full + attention(kind.window))
        + (kept * dense if kind.is_dense else of_experts)
        for kind in set(kinds)
    }
    always_kept = heads + int(attended * wider) + logsumexp
    router = positions * config.n_experts * wide if has_experts else 0
    # that "op" keeps of products, beyond their results in the compute dtype
    before_cast = wide / size - 1 if shape.emulates_float8 else 0.0
    return ActivationBytes(
        blocks=tuple(by_kind[kind] for kind in kinds),
        blocks_by_op=tuple(
            residual
            + (linear_by_op if kind.is_linear else always_kept + saved_inputs(kind.window))
            + (2 * dense + dense_outputs if kind.is_dense else 2 * sparse + sparse_outputs + router)
            + int(before_cast * (heads + 2 * (dense if kind.is_dense else sparse) + n_outputs * gathered))
            for kind in kinds
        ),
        block_input=residual,
        # in the backward pass of w2: the gradients of both factors, and of the residual stream; of experts, also those
        # of their results by position and by expert; or in that of linear attention, when the feed-forward layer's
        # activations are no longer needed; or with operands that are rounded to float8
        block_backward=2 * residual
        + max(max(2 * hidden, shape.rounded_bytes) + routed, _linear_backward(config, shape, wide) - of_feed_forward),
        # of the outputs of all matrix products and norms
        block_split=heads + 2 * hidden + n_outputs * gathered + 2 * residual,
        embedding=positions * 8,
        # with further tokens also the embeddings of next ones
        head=norm
        + config.n_further_tokens * residual
        + heads_of(config) * (gathered if shape.recomputes_logits else head_gradients),
        loss=chunk + (head_gradients if shape.recomputes_logits else 0),
        tables=_table_bytes(config, shape, wide),
        masks={kind.window: _mask_bytes(shape, kind.window) for kind in set(kinds)},
        windows=tuple(kind.window for kind in kinds),
    )


def _table_bytes(config: DecoderConfig, shape: MicrobatchShape, wide: int) -> int:
    """Cosines and sines per position; two of each if only some layers have a window, as in olmo3."""
    has_positions = shape.mask is not None or shape.cp > 1
    kinds = len({window > 0 for window in config.windows})
    return shape.rows * shape.seq_len // shape.cp * 2 * kinds * config.rotary_dim * wide if has_positions else 0


def _mask_bytes(shape: MicrobatchShape, window: int) -> int:
    """One element per query and key; in bands, per query and key of its band and of the one before. The tables of block
    masks are neglected."""
    if shape.mask != "scores":
        return 0
    queries = shape.seq_len // (shape.cp if shape.gathers_keys else 1)
    if window and not shape.gathers_keys:
        queries, keys = -(-queries // window) * window, 2 * window
    else:
        keys = shape.seq_len
    return shape.rows * queries * keys * shape.attention_bytes


def heads_of(config: DecoderConfig) -> int:
    """How often the output layer computes a loss."""
    return 1 + config.n_further_tokens


def _latent_products(config: Any) -> int:
    """Numbers per position that the projections of latent attention give."""
    latents = config.q_lora_rank + config.kv_lora_rank + config.qk_rope_head_dim
    return int(latents + config.n_heads * (config.head_dim + config.qk_nope_head_dim + config.v_head_dim))


def _latent_bytes(config: Any, positions: int, tp: int, size: int, wide: int) -> int:
    """Latent vectors of attention: inputs of their norms, of the rank's own positions, and their results."""
    own, rotated, q_rank, kv_rank = positions // tp, config.qk_rope_head_dim, config.q_lora_rank, config.kv_lora_rank
    norms = sum(_norm_bytes(rank, own, size, wide) for rank in (q_rank, kv_rank) if rank) + own * rotated * size
    gathered = (0 if q_rank else config.dim) + rotated if tp > 1 else 0
    return int(norms + positions * (q_rank + kv_rank + gathered) * size)


def _linear_bytes(config: DecoderConfig, shape: MicrobatchShape, wide: int) -> tuple[int, int]:
    """(all, with the recompute policy "op") of gated linear attention, without its input."""
    positions, size, heads = shape.positions, shape.element_bytes, config.linear_value_heads
    keys, values = config.linear_key_heads * config.linear_key_dim, heads * config.linear_value_dim
    segments = -(-shape.seq_len // (CHUNK * SEGMENT)) + 1
    states = shape.rows * segments * heads * config.linear_key_dim * config.linear_value_dim * wide // shape.cp
    # queries, keys and values before and after the convolution; the results of the rule, normalized, and multiplied by
    # the activation of their gates, with both
    numbers = (2 * (2 * keys + values) + 5 * values) * size + heads * (5 * wide + 2 * size)
    by_op = (2 * keys + 3 * values + 2 * heads) * size
    return (positions * numbers + states) // shape.tp, (positions * by_op + states) // shape.tp


def _linear_backward(config: DecoderConfig, shape: MicrobatchShape, wide: int) -> int:
    """Memory of the rule's backward pass: that of one segment, as measured."""
    key_dim, value_dim = config.linear_key_dim, config.linear_value_dim
    of_head = 8 * CHUNK + 8 * key_dim + 6 * value_dim + 5 * key_dim * value_dim // CHUNK
    numbers = config.linear_value_heads * of_head + 6 * config.linear_key_heads * key_dim
    return shape.rows * min(shape.seq_len, CHUNK * SEGMENT) * numbers * wide // (shape.cp * shape.tp)


def _norm_bytes(dim: int, vectors: int, size: int, wide: int) -> int:
    """Input and reciprocal root mean square."""
    return vectors * (dim * size + wide)
