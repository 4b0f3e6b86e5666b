"""Floating-point operations of a decoder's matrix products, by arithmetic."""

from titanlite.models.decoder.config import DecoderConfig


def num_matmul_parameters(config: DecoderConfig) -> int:
    """Weights that every token is multiplied with: all but the norms' and the embedding lookup's.

    The output layer counts, tied or not.
    """
    attention = 2 * config.dim * (config.n_heads + config.n_kv_heads) * config.head_dim
    feed_forward = 3 * config.dim * config.ffn_dim
    return config.n_layers * (attention + feed_forward) + config.vocab_size * config.dim


def flops_per_token(config: DecoderConfig, seq_len: int) -> int:
    """Floating-point operations of matrix products per trained token, forward and backward: 6N + 12·L·T·H.

    N is num_matmul_parameters: 2 operations per weight forward, 4 backward. Attention multiplies each query with T keys
    and T values in each of L layers, 4·T·H operations forward and twice that backward, H the width of all query heads
    together; the triangle that a causal kernel may skip is counted in full, as is usual for MFU, and recomputation is
    not counted. Source: Chowdhery et al., "PaLM" (2022), appendix B.
    """
    heads = config.n_heads * config.head_dim
    return 6 * num_matmul_parameters(config) + 12 * config.n_layers * seq_len * heads


def unit_flops_per_token(config: DecoderConfig, seq_len: int, unit: str) -> int:
    """The share of one unit of the plan, by the name of its first module, in `flops_per_token`."""
    output = 6 * config.vocab_size * config.dim
    if unit.startswith("layers."):
        return (flops_per_token(config, seq_len) - output) // config.n_layers
    holds_output = unit == "norm" or config.tie_embeddings
    return output if holds_output else 0
