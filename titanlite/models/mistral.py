"""Mistral (Jiang et al., "Mistral 7B", 2023): the decoder with an independent head width, and attention to the last
positions only if it has a window."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from titanlite.models.decoder import Block, Decoder, HyperParameters, check_decoder, check_head_width, decoder_family
from titanlite.models.hugging_face import DecoderFormat, window_of_all_layers, with_head_dim
from titanlite.models.layers import Attention
from titanlite.runtime.errors import Problem


@dataclass(frozen=True)
class MistralConfig(HyperParameters):
    """Hyper-parameters of the mistral family. Each may be given in [model] and overrides the flavor's value."""

    head_dim: int = 128
    """Width of each head; n_heads x head_dim may differ from dim."""
    rope_theta: float = 1_000_000.0
    max_seq_len: int = 32_768
    sliding_window: int = 0
    """Positions that each one sees, its own included; 0: all up to its own."""

    @property
    def windows(self) -> tuple[int, ...]:
        return (self.sliding_window,) * self.n_layers


_7B = MistralConfig(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14_336, vocab_size=32_768)
_12B = replace(_7B, dim=5120, n_layers=40, vocab_size=131_072, max_seq_len=128_000)

FLAVORS = {
    "debug": MistralConfig(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=768, vocab_size=2000, head_dim=64, sliding_window=64
    ),
    "7B-v0.1": replace(_7B, vocab_size=32_000, rope_theta=10_000.0, sliding_window=4096),
    "7B": _7B,
    "12B": _12B,
    "24B": replace(_12B, ffn_dim=32_768, rope_theta=100_000_000.0, max_seq_len=32_768),
}
"""Published sizes (7B: v0.3; 12B: Nemo; 24B: Small 3), and a debug size for a laptop. max_seq_len of 12B is that of the
base model's config.json; the post-trained one has 131,072."""


class Mistral(Decoder):
    """The decoder with an independent head width and a window. block: see Decoder; None: that of Mistral."""

    def __init__(self, config: MistralConfig, block: Callable[[int], nn.Module] | None = None) -> None:
        super().__init__(config, block or (lambda _: Block(config, attention(config))))


def attention(config: MistralConfig) -> Attention:
    """Attention module of one block."""
    heads = (config.n_heads, config.n_kv_heads, config.head_dim)
    return Attention(config.dim, *heads, window=config.sliding_window)


def check(config: MistralConfig, seq_len: int, tp: int, pp: int) -> list[Problem]:
    return [*check_decoder(config, seq_len, tp, pp), *check_head_width(config)]


FORMAT = DecoderFormat(
    MistralConfig,
    check,
    fields={"sliding_window": "sliding_window"},
    prepared=lambda fields: window_of_all_layers(with_head_dim(fields), 4096),
    written=lambda config: {"sliding_window": config.sliding_window or None},
)

MISTRAL = decoder_family("mistral", FLAVORS, check, Mistral, FORMAT.hugging_face("mistral", "MistralForCausalLM"))
