"""Gemma 2 (Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024): the decoder with norms
before and after attention and feed-forward, GeGLU, scaled embeddings, attention to the last positions only in every
second layer, and soft caps of the scores and logits."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import nn

from titanlite.models.decoder import (
    Block,
    Decoder,
    HyperParameters,
    WindowHyperParameters,
    check_decoder,
    check_head_width,
    check_windows,
    decoder_family,
)
from titanlite.models.hugging_face import (
    ALL_NORM_NAMES,
    NO_SPECIAL_TOKENS,
    DecoderFormat,
    number_or_none,
    window_fields,
    written_windows,
)
from titanlite.models.layers import Attention, FeedForward
from titanlite.models.linear import gelu_tanh
from titanlite.runtime.errors import Problem


@dataclass(frozen=True)
class GemmaConfig(WindowHyperParameters, HyperParameters):
    """Hyper-parameters of Gemma 2 and 3."""

    head_dim: int = 256
    """Width of each head; n_heads x head_dim may differ from dim."""
    norm_eps: float = 1e-6
    max_seq_len: int = 8192
    tie_embeddings: bool = True
    query_pre_attn_scalar: int = 256
    """Scores are divided by its square root."""
    logit_cap: float = 30.0
    """Logits are logit_cap x tanh(logits / logit_cap); 0.0: they are not capped."""
    norm_offset: ClassVar[float] = 1.0
    norms: ClassVar[Any] = "both"

    @property
    def embedding_scale(self) -> float:
        return math.sqrt(self.dim)

    @property
    def query_factor(self) -> float:
        """Of queries whose scores are divided by sqrt(head_dim)."""
        return math.sqrt(self.head_dim / self.query_pre_attn_scalar)


@dataclass(frozen=True)
class Gemma2Config(GemmaConfig):
    """Hyper-parameters of the gemma2 family. Each may be given in [model] and overrides the flavor's value."""

    score_cap: float = 50.0
    """Scores of attention are score_cap x tanh(scores / score_cap); 0.0: they are not capped."""


_2B = Gemma2Config(dim=2304, n_layers=26, n_heads=8, n_kv_heads=4, ffn_dim=9216, vocab_size=256_000)

FLAVORS = {
    "debug": Gemma2Config(
        *(256, 6, 8, 4, 768, 2000), head_dim=64, tie_embeddings=False, sliding_window=64, query_pre_attn_scalar=64
    ),
    "2B": _2B,
    "9B": replace(_2B, dim=3584, n_layers=42, n_heads=16, n_kv_heads=8, ffn_dim=14_336),
    "27B": replace(
        _2B, dim=4608, n_layers=46, n_heads=32, n_kv_heads=16, ffn_dim=36_864, head_dim=128, query_pre_attn_scalar=144
    ),
}
"""Published sizes, and a debug size for a laptop."""


class Gemma2(Decoder):
    """The decoder with the blocks of Gemma 2. block: see Decoder."""

    def __init__(self, config: Gemma2Config, block: Callable[[int], nn.Module] | None = None) -> None:
        super().__init__(config, block or (lambda index: gemma_block(config, attention(config, index))))


def attention(config: Gemma2Config, index: int) -> Attention:
    """Attention module of the block of a layer, by its index."""
    heads, window = (config.n_heads, config.n_kv_heads, config.head_dim), config.windows[index]
    return Attention(config.dim, *heads, window=window, query_factor=config.query_factor, cap=config.score_cap)


def gemma_block(config: GemmaConfig, of_block: Attention) -> Block:
    """Block with norms before and after attention and feed-forward, and with GeGLU."""
    return Block(config, of_block, FeedForward(config.dim, config.ffn_dim, gelu_tanh))


def check(config: GemmaConfig, seq_len: int, tp: int, pp: int) -> list[Problem]:
    return [*check_decoder(config, seq_len, tp, pp), *check_head_width(config), *check_windows(config)]


def prepared(fields: Mapping[str, Any], interval: int, caps: Mapping[str, float]) -> dict[str, Any]:
    """Fields of config.json with an interval for `layer_types`, and 0 for a window or cap that is null. interval, caps:
    where the fields are missing."""
    own = window_fields(fields, interval, 4096, "sliding_window_pattern")
    if fields.get("hidden_activation") is not None:  # transformers reads no other
        own["hidden_act"] = None
    return own | {name: number_or_none(fields, name, float, cap) for name, cap in caps.items()}


def written(config: GemmaConfig, caps: Mapping[str, float]) -> dict[str, Any]:
    """Further fields of config.json. caps: null if they are 0."""
    return NO_SPECIAL_TOKENS | written_windows(config) | {name: cap or None for name, cap in caps.items()}


FIELDS = {
    "sliding_window": "sliding_window",
    "full_interval": "sliding_window_pattern",
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "logit_cap": "final_logit_softcapping",
}
SUPPORTED = {
    **dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh"),
    "use_bidirectional_attention": False,
}
FORMAT = DecoderFormat(
    Gemma2Config,
    check,
    fields=FIELDS | {"score_cap": "attn_logit_softcapping"},
    norm_names=ALL_NORM_NAMES,
    supported=SUPPORTED,
    prepared=partial(prepared, interval=2, caps={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    written=lambda config: written(
        config, {"attn_logit_softcapping": config.score_cap, "final_logit_softcapping": config.logit_cap}
    ),
)

GEMMA2 = decoder_family("gemma2", FLAVORS, check, Gemma2, FORMAT.hugging_face("gemma2", "Gemma2ForCausalLM"))
