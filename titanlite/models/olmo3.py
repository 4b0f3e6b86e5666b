"""OLMo 3 (Team OLMo, "Olmo 3", 2025): OLMo 2 with attention to the last positions only in most layers. YaRN stretches
the rotary embeddings of the others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from titanlite.models import olmo2
from titanlite.models.decoder import Block, Decoder, WindowHyperParameters, check_windows, decoder_family
from titanlite.models.hugging_face import (
    HEAD_NORM_NAMES,
    NO_SPECIAL_TOKENS,
    POST_NORM_NAMES,
    YARN,
    DecoderFormat,
    rope_of_full_layers,
    window_fields,
    written_windows,
)
from titanlite.models.layers import RotaryEmbedding
from titanlite.models.olmo2 import Z_LOSS, Olmo2Config, attention
from titanlite.models.qwen3 import NEEDS, check_yarn, yarn
from titanlite.runtime.errors import Problem


@dataclass(frozen=True)
class Olmo3Config(WindowHyperParameters, Olmo2Config):
    """Hyper-parameters of the olmo3 family. Each may be given in [model] and overrides the flavor's value."""

    max_seq_len: int = 65_536
    full_interval: int = 4
    rope_scaling_factor: float = 1.0
    """Factor by which YaRN stretches long rotary wavelengths of layers that see all positions; 1.0: no scaling."""
    rope_beta_fast: float = 32.0
    """Pairs that make more turns than this within rope_original_seq_len are not stretched."""
    rope_beta_slow: float = 1.0
    """Pairs that make fewer turns than this within rope_original_seq_len are stretched by the full factor."""
    rope_original_seq_len: int = 8192
    """Context length before the scaling."""


_7B = Olmo3Config(
    dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, ffn_dim=11_008, vocab_size=100_278, rope_scaling_factor=8.0
)

FLAVORS = {
    "debug": Olmo3Config(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=8, ffn_dim=768, vocab_size=2000, sliding_window=64, full_interval=3
    ),
    "7B": _7B,
    "32B": replace(_7B, dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, ffn_dim=27_648),
}
"""Published sizes, and a debug size for a laptop. Initial values are those of OLMo 2, as in OLMo-core."""


class Olmo3(Decoder):
    """OLMo 2 with windows in most layers, and YaRN in the others. block: see Decoder; None: that of OLMo 3."""

    def __init__(self, config: Olmo3Config, block: Callable[[int], nn.Module] | None = None) -> None:
        def own(index: int) -> Block:
            return Block(config, attention(config, config.windows[index]))

        local = RotaryEmbedding(config.head_dim, config.max_seq_len, config.rope_theta, None)
        super().__init__(config, block or own, yarn(config), local_rope=local)


def check(config: Olmo3Config, seq_len: int, tp: int, pp: int) -> list[Problem]:
    return [*olmo2.check(config, seq_len, tp, pp), *check_yarn(config), *check_windows(config)]


def _prepared(fields: Mapping[str, Any]) -> dict[str, Any]:
    """With the rotary embeddings of layers that see all positions."""
    return window_fields(rope_of_full_layers(fields, Olmo3Config.rope_theta), 4, 4096)


def _written(config: Olmo3Config) -> dict[str, Any]:
    fields = written_windows(config)
    if config.rope_theta != Olmo3Config.rope_theta:  # transformers reads another base for both kinds from here only
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}
        fields["rope_parameters"] = {"full_attention": rope | (YARN.written(config) or {}), "sliding_attention": rope}
    return NO_SPECIAL_TOKENS | fields


FORMAT = DecoderFormat(
    Olmo3Config,
    check,
    fields={"sliding_window": "sliding_window", "full_interval": "full_attention_interval"},
    norm_names=POST_NORM_NAMES,
    block_names=HEAD_NORM_NAMES,
    scaling=YARN,
    default_theta=Olmo3Config.rope_theta,
    prepared=_prepared,
    written=_written,
)

OLMO3 = replace(
    decoder_family(*("olmo3", FLAVORS, check, Olmo3), FORMAT.hugging_face("olmo3", "Olmo3ForCausalLM"), needs=NEEDS),
    logit_z_loss=Z_LOSS,
)
