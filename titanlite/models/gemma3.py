"""The text model of Gemma 3 (Gemma Team, "Gemma 3 Technical Report", 2025): Gemma 2 with RMSNorm on each head of
queries and of keys before the rotation in place of the caps, with attention to the last positions only in five of six
layers, and with another base of the rotary embeddings in those."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from titanlite.models.decoder import Decoder, decoder_family, norm_of
from titanlite.models.gemma2 import FIELDS, SUPPORTED, GemmaConfig, check, gemma_block, prepared, written
from titanlite.models.hugging_face import (
    ALL_NORM_NAMES,
    HEAD_NORM_NAMES,
    DecoderFormat,
    Scaling,
    read_field,
    refuse_other,
    rope_of_full_layers,
)
from titanlite.models.layers import Attention, LinearScaling, RotaryEmbedding


@dataclass(frozen=True)
class Gemma3Config(GemmaConfig):
    """Hyper-parameters of the gemma3 family. Each may be given in [model] and overrides the flavor's value."""

    rope_theta: float = 1_000_000.0
    """Base of the rotary wavelengths of layers that see all positions."""
    rope_local_theta: float = 10_000.0
    """Base of the rotary wavelengths of layers with a window."""
    rope_scaling_factor: float = 1.0
    """Factor of the rotary wavelengths of layers that see all positions; 1.0: no scaling."""
    max_seq_len: int = 131_072
    sliding_window: int = 1024
    full_interval: int = 6
    logit_cap: float = 0.0


_1B = Gemma3Config(1152, 26, 4, 1, 6912, 262_144, max_seq_len=32_768, sliding_window=512)
_4B = Gemma3Config(2560, 34, 8, 4, 10_240, 262_208, rope_scaling_factor=8.0)

FLAVORS = {
    "debug": Gemma3Config(
        *(256, 6, 8, 4, 768, 2000),
        head_dim=64,
        tie_embeddings=False,
        sliding_window=64,
        full_interval=3,
        query_pre_attn_scalar=64,
    ),
    "270M": replace(_1B, dim=640, n_layers=18, ffn_dim=2048),
    "1B": _1B,
    "4B": _4B,
    "12B": replace(_4B, dim=3840, n_layers=48, n_heads=16, n_kv_heads=8, ffn_dim=15_360),
    "27B": replace(
        _4B, dim=5376, n_layers=62, n_heads=32, n_kv_heads=16, ffn_dim=21_504, head_dim=128, query_pre_attn_scalar=168
    ),
}
"""Published sizes, and a debug size for a laptop."""


class Gemma3(Decoder):
    """The decoder with the blocks of Gemma 3. block: see Decoder."""

    def __init__(self, config: Gemma3Config, block: Callable[[int], nn.Module] | None = None) -> None:
        scaling = LinearScaling(config.rope_scaling_factor) if config.rope_scaling_factor > 1 else None
        local = RotaryEmbedding(config.head_dim, config.max_seq_len, config.rope_local_theta, None)
        own = block or (lambda index: gemma_block(config, attention(config, index)))
        super().__init__(config, own, scaling, local_rope=local)


def attention(config: Gemma3Config, index: int) -> Attention:
    """Attention module of the block of a layer, by its index."""
    heads = (config.n_heads, config.n_kv_heads, config.head_dim)
    norms = [norm_of(config, config.head_dim) for _ in range(2)]
    return Attention(config.dim, *heads, *norms, window=config.windows[index], query_factor=config.query_factor)


TEXT_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "query_pre_attn_scalar": 256,
}
"""Values of transformers for fields that published folders of the larger sizes leave out."""
CAP = "final_logit_softcapping"


def _prepared(fields: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in fields.items() if value is not None or name in ("sliding_window", CAP)}
    if "wrapper" in fields:
        refuse_other(fields, {CAP: None})  # transformers does not cap the logits of models that wrap this one
    interval = read_field(fields, "sliding_window_pattern", int, 6)
    full = prepared(TEXT_DEFAULTS | given, interval=interval, caps={CAP: 0.0})
    return rope_of_full_layers(full, TEXT_DEFAULTS["rope_theta"], "rope_local_base_freq")


FORMAT = DecoderFormat(
    Gemma3Config,
    check,
    fields=FIELDS | {"rope_local_theta": "rope_local_base_freq"},
    norm_names=ALL_NORM_NAMES,
    block_names=HEAD_NORM_NAMES,
    supported=SUPPORTED | {"attn_logit_softcapping": None},
    scaling=Scaling("linear", {"rope_scaling_factor": "factor"}),
    prepared=_prepared,
    written=lambda config: written(config, {CAP: config.logit_cap}),
)

GEMMA3 = decoder_family("gemma3", FLAVORS, check, Gemma3, FORMAT.hugging_face("gemma3_text", "Gemma3ForCausalLM"))
