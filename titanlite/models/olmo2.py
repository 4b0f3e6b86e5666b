"""OLMo 2 (Team OLMo, "2 OLMo 2 Furious", 2024): the decoder with norms after attention and feed-forward, and with
RMSNorm over all heads of queries, and over all of keys, before the rotation."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from titanlite.models.decoder import Block, Decoder, HyperParameters, check_decoder, check_width, decoder_family
from titanlite.models.hugging_face import HEAD_NORM_NAMES, NO_SPECIAL_TOKENS, POST_NORM_NAMES, DecoderFormat
from titanlite.models.layers import Attention, WideNorm
from titanlite.runtime.errors import Problem


@dataclass(frozen=True)
class Olmo2Config(HyperParameters):
    """Hyper-parameters of the olmo2 family. Each may be given in [model] and overrides the flavor's value."""

    norm_eps: float = 1e-6
    rope_theta: float = 500_000.0
    init_by_depth: bool = False
    norms: ClassVar[Any] = "after"


_7B = Olmo2Config(dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, ffn_dim=11_008, vocab_size=100_352)

FLAVORS = {
    "debug": Olmo2Config(dim=256, n_layers=6, n_heads=8, n_kv_heads=8, ffn_dim=768, vocab_size=2000),
    "1B": replace(_7B, dim=2048, n_layers=16, n_heads=16, n_kv_heads=16, ffn_dim=8192),
    "7B": _7B,
    "13B": replace(_7B, dim=5120, n_layers=40, n_heads=40, n_kv_heads=40, ffn_dim=13_824),
    "32B": replace(_7B, dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, ffn_dim=27_648),
}
"""Published sizes, and a debug size for a laptop. Initial values: the report, section 3.2: normal with a standard
deviation of 0.02, cut at three of them, in all matrices."""


class Olmo2(Decoder):
    """The decoder with norms after attention and feed-forward, and over all heads of queries and of keys. block: see
    Decoder; None: that of OLMo 2."""

    def __init__(self, config: Olmo2Config, block: Callable[[int], nn.Module] | None = None) -> None:
        super().__init__(config, block or (lambda _: Block(config, attention(config))))


def attention(config: Olmo2Config, window: int = 0) -> Attention:
    """Attention module of one block. window: see Attention."""
    heads = (config.n_heads, config.n_kv_heads)
    norms = [WideNorm(number * config.head_dim, config.norm_eps) for number in heads]
    return Attention(config.dim, *heads, config.head_dim, *norms, window=window)


def check(config: Olmo2Config, seq_len: int, tp: int, pp: int) -> list[Problem]:
    return [*check_decoder(config, seq_len, tp, pp), *check_width(config)]


FORMAT = DecoderFormat(
    Olmo2Config, check, norm_names=POST_NORM_NAMES, block_names=HEAD_NORM_NAMES, written=lambda _: NO_SPECIAL_TOKENS
)

Z_LOSS = 1e-5
"""Of the logits, in OLMo-core's official scripts for OLMo 2 and 3."""
OLMO2 = replace(
    decoder_family("olmo2", FLAVORS, check, Olmo2, FORMAT.hugging_face("olmo2", "Olmo2ForCausalLM")),
    logit_z_loss=Z_LOSS,
)
