"""Qwen3, dense (Qwen Team, "Qwen3 Technical Report", 2025) in plain torch."""

from functools import partial

from titanlite.models.decoder.model import Decoder
from titanlite.models.layers import Attention
from titanlite.models.qwen3.config import Qwen3Config


class Qwen3(Decoder):
    """The decoder with heads of a width of their own, whose queries and keys are normalised before they are rotated."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config, partial(attention, config))


def attention(config: Qwen3Config) -> Attention:
    """That of one block."""
    return Attention(config.dim, config.n_heads, config.n_kv_heads, config.head_dim, head_norm_eps=config.norm_eps)
