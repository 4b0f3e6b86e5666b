"""What a microbatch of a decoder keeps in memory between its forward and its backward pass, by arithmetic."""

from titanlite.models.decoder.config import DecoderConfig
from titanlite.models.family import ActivationBytes, MicrobatchShape


def activation_bytes(config: DecoderConfig, shape: MicrobatchShape, *, head_norms: bool = False) -> ActivationBytes:
    """Counted off the model's own forward pass, operation by operation; measured against it in docs/parallelism.md.

    With tensor parallelism the residual stream is cut along the sequence, the inside of attention and feed-forward by
    heads and features; what the column layers read was gathered, so it is whole on every rank. A selective policy "op"
    also keeps the unreduced outputs of the row layers, which are whole too.

    head_norms: whether each head of queries and keys is normalised.
    """
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
