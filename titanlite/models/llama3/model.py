"""Llama 3 (Grattafiori et al., "The Llama 3 Herd of Models", 2024) in plain torch."""

from functools import partial

from titanlite.models.decoder.model import Decoder
from titanlite.models.layers import Attention, RopeScaling
from titanlite.models.llama3.config import Llama3Config


class Llama3(Decoder):
    """The decoder with Llama 3.1's rotary scaling."""

    def __init__(self, config: Llama3Config) -> None:
        scaling = RopeScaling(
            config.rope_scaling_factor,
            config.rope_low_freq_factor,
            config.rope_high_freq_factor,
            config.rope_original_seq_len,
        )
        super().__init__(config, partial(attention, config), scaling)


def attention(config: Llama3Config) -> Attention:
    """That of one block."""
    return Attention(config.dim, config.n_heads, config.n_kv_heads, config.head_dim)
