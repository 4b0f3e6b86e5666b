"""Compute the activation memory of a decoder's microbatch between its forward and its backward pass, analytically."""

from dataclasses import dataclass

from titanlite.models.attention import MaskForm
from titanlite.models.family import DecoderConfig, Structure
from titanlite.models.head import PART_IDS


@dataclass(frozen=True)
class MicrobatchShape:
    """One microbatch on one of cp x tp ranks: rows x seq_len / cp positions, in a compute dtype of `element_bytes`,
    attention in one of `attention_bytes`.

    loss_chunk: positions whose logits exist at the same time. shard_logits: whether each rank has the logits of its
    part of the vocabulary only. recomputes_logits: whether the head's backward pass computes them again, as with a
    pipeline. mask: the form of the mask; None: causal. gathers_keys: whether each of the cp ranks attends to gathered
    keys and values, instead of exchanging positions for heads. extra_logits: of a registered loss, see
    models/losses.py; None for the cross-entropy.
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

    @property
    def positions(self) -> int:
        """Of one rank."""
        return self.rows * self.seq_len // self.cp

    def window_of(self, config: DecoderConfig) -> int:
        """The largest window of the layers; 0 if a layer has none, or one of an entire row."""
        largest = max(window or self.seq_len for window in config.windows)
        return largest if largest < self.seq_len else 0


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes on one rank that a microbatch keeps until its backward pass, by owner.

    block: one transformer block; block_by_op: with the recompute policy "op"; block_input: with full recomputation.
    block_backward: additional memory of the backward pass of one block. block_split: gradients that wait for those of
    weights if the backward pass is split. embedding, head: first and last FSDP unit.
    loss: additional memory while the head computes the loss, or its gradients.
    documents: mask and positions, shared by all blocks of a stage.
    """

    block: int
    block_by_op: int
    block_input: int
    block_backward: int
    block_split: int
    embedding: int
    head: int
    loss: int
    documents: int


def activation_bytes(config: DecoderConfig, structure: Structure, shape: MicrobatchShape) -> ActivationBytes:
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
    heads = positions * (query_dim + 2 * kv_dim) * size // tp  # queries, keys, values
    # of a window, each band of queries has copies of its own keys and of those of the band before
    copies = 2 if shape.window_of(config) and shape.mask != "blocks" and not shape.gathers_keys else 1
    attention_inputs = positions * (query_dim + 2 * copies * rows_of_keys * n_kv_heads * config.head_dim) * size // tp
    attended = positions * query_dim * size // tp
    # copies in a wider dtype: saved in place of queries, keys and values, and beside the result, as after an exchange
    wider = shape.attention_bytes / size
    attention = (
        int(attention_inputs * wider) + attended + (int(attended * wider) if wider > 1 or exchanges_heads else 0)
    )
    logsumexp = positions * config.n_heads * wide // tp
    n_active = config.n_active_experts
    hidden = n_active * positions * config.ffn_dim * size // tp
    norm = _norm_bytes(config.dim, positions // tp, size, wide)
    styles = structure.tensor_styles.values()
    head_norm = 0
    if "head_norm" in styles:
        head_norm = _norm_bytes(config.head_dim, positions * (config.n_heads + config.n_kv_heads) // tp, size, wide)
    if "wide_norm" in styles:
        head_norm = sum(_norm_bytes(dim // tp, positions, size, wide) for dim in (query_dim, kv_dim))
    # of wo and w2, before and after the reduction
    row_outputs = (1 + n_active) * gathered + (2 * residual if tp > 1 else 0)
    has_experts = config.n_experts > 1
    scores = positions * config.n_experts * wide if has_experts else 0
    # the rows by expert, their results by position in the wide dtype; per choice three indexes and two weights
    routed = n_active * positions * (config.dim * (size + wide) + 3 * 8 + 2 * wide) if has_experts else 0
    wide_input = positions * config.dim * wide if has_experts and wide != size else 0
    own_ids = -(-config.vocab_size // tp)
    columns = own_ids if shape.shard_logits else config.vocab_size
    # logits in the wide dtype and, if it differs, logits and their gradients in the compute dtype
    tokens = min(shape.loss_chunk, positions)
    chunk = tokens * columns * (wide if wide == size else wide + 2 * size)
    if shape.extra_logits is not None:  # beside the own logits, those of all ids, if they are another tensor
        full = shape.extra_logits + (wide != size or tp > 1)
        chunk = tokens * (own_ids * size + int(full * config.vocab_size * wide))
    if wide != size:  # the gradient of the head's weight: added up in the wide dtype in parts, at the end in both
        part = min(PART_IDS, own_ids) * config.dim * (size + wide)
        chunk = max(chunk + part + own_ids * config.dim * (wide - size), own_ids * config.dim * wide)
    head_gradients = gathered + own_ids * config.dim * size
    return ActivationBytes(
        # the norms, the inputs of wq, wk, wv and of w1, w3, attention, and of SwiGLU: both inputs, silu, the product
        block=norms_of_block(structure) * norm
        + head_norm
        + 2 * gathered
        + attention
        + logsumexp
        + 4 * hidden
        + scores
        + routed
        + wide_input,
        block_by_op=residual + heads + int(attended * wider) + logsumexp + 2 * hidden + row_outputs + scores,
        block_input=residual,
        # in the backward pass of w2: the gradients of both factors, and of the residual stream; of experts, also those
        # of their results by position and by expert
        block_backward=2 * hidden + 2 * residual + routed,
        # of the outputs of all matrix products and norms
        block_split=heads + 2 * hidden + (1 + n_active) * gathered + 2 * residual,
        embedding=positions * 8,
        head=norm + (gathered if shape.recomputes_logits else head_gradients),
        loss=chunk + (head_gradients if shape.recomputes_logits else 0),
        documents=_document_bytes(config, shape, wide),
    )


def _document_bytes(config: DecoderConfig, shape: MicrobatchShape, wide: int) -> int:
    """Cosines and sines per position, and one element per query and key. Block-mask tables are neglected."""
    has_positions = shape.mask is not None or shape.cp > 1
    tables = shape.seq_len // shape.cp * 2 * config.head_dim * wide if has_positions else 0
    queries = shape.seq_len // (shape.cp if shape.gathers_keys else 1)
    keys = shape.seq_len if shape.gathers_keys else min(2 * shape.window_of(config) or shape.seq_len, shape.seq_len)
    pairs = queries * keys * shape.attention_bytes if shape.mask == "scores" else 0
    return shape.rows * (tables + pairs)


def norms_of_block(structure: Structure) -> int:
    """Number of norms of the residual stream in each block."""
    return sum(style == "norm" and name.startswith("layers.") for name, style in structure.tensor_styles.items())


def _norm_bytes(dim: int, vectors: int, size: int, wide: int) -> int:
    """Input and reciprocal root mean square."""
    return vectors * (dim * size + wide)
