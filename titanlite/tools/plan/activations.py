"""What a microbatch of a decoder keeps in memory between its forward and its backward pass, by arithmetic."""

from dataclasses import dataclass

from titanlite.models.attention import MaskForm
from titanlite.models.decoder import flops_per_token
from titanlite.models.family import DecoderConfig, Plan


@dataclass(frozen=True)
class MicrobatchShape:
    """Of one microbatch on one rank of `tp`: rows x seq_len positions, in a compute dtype of `element_bytes`.

    shard_logits: whether logits are cut along the vocabulary. fused_norm: whether RMSNorm is one kernel, as on CUDA;
    elsewhere torch composes it of several operations, which keep more. mask: in which form attention is kept inside
    documents; None: rows are documents.
    """

    rows: int
    seq_len: int
    tp: int
    element_bytes: int
    shard_logits: bool
    fused_norm: bool
    mask: MaskForm | None = None


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes on one rank that a microbatch keeps until its backward pass, by who keeps them.

    block: a transformer block; block_by_op: with the recompute policy "op"; block_input: with full recomputation.
    block_backward: what the backward pass of one block takes beside that. embedding, head: first and last unit.
    loss: what the cross-entropy keeps; loss_backward: what its backward pass takes beside that. logits: themselves.
    documents: what all blocks of a stage share to keep attention, and positions, inside documents.
    """

    block: int
    block_by_op: int
    block_input: int
    block_backward: int
    embedding: int
    head: int
    loss: int
    loss_backward: int
    logits: int
    documents: int


def activation_bytes(config: DecoderConfig, plan: Plan, shape: MicrobatchShape) -> ActivationBytes:
    """Counted off the model's own forward pass, operation by operation; measured against it in docs/parallelism.md.

    With tensor parallelism the residual stream is cut along the sequence, the inside of attention and feed-forward by
    heads and features; what the column layers read was gathered, so it is whole on every rank. A selective policy "op"
    also keeps the unreduced outputs of the row layers, which are whole too.
    """
    head_norms = "head_norm" in plan.tensor_styles.values()
    positions, tp, size = shape.rows * shape.seq_len, shape.tp, shape.element_bytes
    query_dim, kv_dim = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    wide = max(size, 4)  # bytes of the islands of higher precision
    residual = positions * config.dim * size // tp
    gathered = positions * config.dim * size
    heads = positions * (query_dim + 2 * kv_dim) * size // tp  # queries, keys, values
    attended = positions * query_dim * size // tp
    logsumexp = positions * config.n_heads * wide // tp
    hidden = positions * config.ffn_dim * size // tp
    norm = _norm_bytes(config.dim, positions // tp, size, wide, fused=shape.fused_norm)
    normed_heads = positions * (config.n_heads + config.n_kv_heads) // tp if head_norms else 0
    head_norm = _norm_bytes(config.head_dim, normed_heads, size, wide, fused=shape.fused_norm)
    row_outputs = 2 * (gathered + (residual if tp > 1 else 0))  # of wo and w2, before and after they are summed
    scores = positions * config.vocab_size * wide // (tp if shape.shard_logits else 1)
    return ActivationBytes(
        # two norms, what wq, wk, wv and w1, w3 read, attention, and of SwiGLU: both factors' inputs, silu, the product
        block=2 * norm + head_norm + 2 * gathered + heads + attended + logsumexp + 4 * hidden,
        block_by_op=residual + heads + attended + logsumexp + 2 * hidden + row_outputs,
        block_input=residual,
        # in the backward pass of w2: the gradients of both factors, and of the residual stream
        block_backward=2 * hidden + 2 * residual,
        embedding=positions * 8,
        head=norm + gathered,
        # log-probabilities; their gradient comes in two steps, each of the same size
        loss=scores,
        loss_backward=2 * scores,
        logits=scores * size // wide,
        documents=_document_bytes(config, shape, wide),
    )


def _document_bytes(config: DecoderConfig, shape: MicrobatchShape, wide: int) -> int:
    """Cosines and sines of each position, and a number for each pair of positions; tables of blocks are left out."""
    if shape.mask is None:
        return 0
    pairs = shape.seq_len * shape.element_bytes if shape.mask == "scores" else 0
    return shape.rows * shape.seq_len * (config.head_dim * wide + pairs)


def _norm_bytes(dim: int, vectors: int, size: int, wide: int, *, fused: bool) -> int:
    """Input and reciprocal root mean square; unfused also the normalised input, both in the wider type."""
    kept = dim * size if fused else 2 * dim * wide
    return vectors * (kept + wide)


def unit_flops_per_token(config: DecoderConfig, seq_len: int, unit: str) -> int:
    """The share of one unit of the plan, by the name of its first module, in `flops_per_token`."""
    output = 6 * config.vocab_size * config.dim
    if unit.startswith("layers."):
        return (flops_per_token(config, seq_len) - output) // config.n_layers
    holds_output = unit == "norm" or config.tie_embeddings
    return output if holds_output else 0
