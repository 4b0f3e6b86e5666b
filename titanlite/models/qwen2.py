"""Qwen2 and Qwen2.5 (Qwen Team, "Qwen2.5 Technical Report", 2024): the decoder with biases of queries, keys and
values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from titanlite.models.decoder import Block, Decoder, HyperParameters, check_decoder, check_width, decoder_family
from titanlite.models.hugging_face import DecoderFormat, refuse_other, without_unused_window
from titanlite.models.layers import Attention
from titanlite.runtime.errors import Problem


@dataclass(frozen=True)
class Qwen2Config(HyperParameters):
    """Hyper-parameters of the qwen2 family. Each may be given in [model] and overrides the flavor's value."""

    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    max_seq_len: int = 32_768


_SMALL = Qwen2Config(
    dim=896, n_layers=24, n_heads=14, n_kv_heads=2, ffn_dim=4864, vocab_size=151_936, tie_embeddings=True
)
_7B = Qwen2Config(
    dim=3584, n_layers=28, n_heads=28, n_kv_heads=4, ffn_dim=18_944, vocab_size=152_064, max_seq_len=131_072
)
_LARGE = replace(_7B, dim=5120, n_layers=48, n_heads=40, n_kv_heads=8, ffn_dim=13_824, norm_eps=1e-5)

FLAVORS = {
    "debug": Qwen2Config(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=768, vocab_size=2000),
    "0.5B": _SMALL,
    "1.5B": replace(_SMALL, dim=1536, n_layers=28, n_heads=12, ffn_dim=8960, max_seq_len=131_072),
    "3B": replace(_SMALL, dim=2048, n_layers=36, n_heads=16, ffn_dim=11_008),
    "7B": _7B,
    "14B": _LARGE,
    "32B": replace(_LARGE, n_layers=64, ffn_dim=27_648),
    "72B": replace(_LARGE, dim=8192, n_layers=80, n_heads=64, ffn_dim=29_568),
}
"""Published sizes of the base models of Qwen2.5, and a debug size for a laptop: max_seq_len and norm_eps are those of
their config.json. The post-trained models have 32,768, and those of 14B, 32B and 72B a norm_eps of 1e-6."""


class Qwen2(Decoder):
    """The decoder with biases of queries, keys and values. block: see Decoder; None: that of Qwen2."""

    def __init__(self, config: Qwen2Config, block: Callable[[int], nn.Module] | None = None) -> None:
        super().__init__(config, block or (lambda _: Block(config, attention(config))))


def attention(config: Qwen2Config) -> Attention:
    """Attention module of one block."""
    return Attention(config.dim, config.n_heads, config.n_kv_heads, config.head_dim, bias=True)


def check(config: Qwen2Config, seq_len: int, tp: int, pp: int) -> list[Problem]:
    return [*check_decoder(config, seq_len, tp, pp), *check_width(config)]


def _prepared(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without attention_bias, which transformers does not read: queries, keys and values have biases."""
    refuse_other(fields, {"attention_bias": True})
    return {**without_unused_window(fields), "attention_bias": None}


FORMAT = DecoderFormat(
    Qwen2Config,
    check,
    biases=("attention.wq", "attention.wk", "attention.wv"),
    supported={"attention_bias": None, "use_sliding_window": False},
    prepared=_prepared,
)

QWEN2 = decoder_family("qwen2", FLAVORS, check, Qwen2, FORMAT.hugging_face("qwen2", "Qwen2ForCausalLM"))
