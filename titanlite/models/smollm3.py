"""SmolLM3 (Hugging Face, 2025): the decoder with some layers that have no rotary embeddings (Yang et al., "RoPE to NoPE
and Back Again", 2025)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from titanlite.models.decoder import Block, Decoder, HyperParameters, check_decoder, check_width, decoder_family
from titanlite.models.hugging_face import (
    NO_SPECIAL_TOKENS,
    DecoderFormat,
    fixed_interval,
    read_field,
    without_unused_window,
)
from titanlite.models.layers import Attention
from titanlite.runtime.errors import Problem, UserError


@dataclass(frozen=True)
class Smollm3Config(HyperParameters):
    """Hyper-parameters of the smollm3 family. Each may be given in [model] and overrides the flavor's value."""

    norm_eps: float = 1e-6
    rope_theta: float = 5_000_000.0
    max_seq_len: int = 65_536
    no_rope_interval: int = 4
    """Each layer whose number, from 1, is a multiple of it has no rotary embeddings; above n_layers: none."""


FLAVORS = {
    "debug": Smollm3Config(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=768, vocab_size=2000),
    "3B": Smollm3Config(
        dim=2048, n_layers=36, n_heads=16, n_kv_heads=4, ffn_dim=11_008, vocab_size=128_256, tie_embeddings=True
    ),
}
"""The published size, and a debug size for a laptop."""


class Smollm3(Decoder):
    """The decoder with some layers without rotary embeddings. block: see Decoder; None: that of SmolLM3."""

    def __init__(self, config: Smollm3Config, block: Callable[[int], nn.Module] | None = None) -> None:
        super().__init__(config, block or (lambda index: Block(config, attention(config, index))))


def attention(config: Smollm3Config, index: int) -> Attention:
    """Attention module of the block of a layer, by its index."""
    rotates = bool(_rotated(config.no_rope_interval, config.n_layers)[index])
    return Attention(config.dim, config.n_heads, config.n_kv_heads, config.head_dim, rotates=rotates)


def _rotated(interval: int, n_layers: int) -> list[int]:
    """1 or 0 for each layer: whether it has rotary embeddings."""
    return [int(interval < 1 or number % interval != 0) for number in range(1, n_layers + 1)]


def check(config: Smollm3Config, seq_len: int, tp: int, pp: int) -> list[Problem]:
    return [*check_decoder(config, seq_len, tp, pp), *check_width(config)]


def _prepared(fields: Mapping[str, Any]) -> dict[str, Any]:
    """With the interval, which the list of layers, if there is one, must follow."""
    interval = read_field(fields, "no_rope_layer_interval", int, 4)
    found = fixed_interval(fields, "no_rope_layers", _rotated, interval)
    if fields.get("no_rope_layers") and found == 1:
        raise UserError("config.json: no_rope_layers has no 1: this family supports only models with rotary embeddings")
    # without layer_types, all layers without rotary embeddings have the window; the default is none
    windows = without_unused_window({"sliding_window": None, **fields, "max_window_layers": 0})
    tied = fields.get("tie_word_embeddings")
    return {**windows, "no_rope_layer_interval": found, "tie_word_embeddings": True if tied is None else tied}


def _written(config: Smollm3Config) -> dict[str, Any]:
    return NO_SPECIAL_TOKENS | {"no_rope_layers": _rotated(config.no_rope_interval, config.n_layers)}


FORMAT = DecoderFormat(
    Smollm3Config,
    check,
    fields={"no_rope_interval": "no_rope_layer_interval"},
    supported={"mlp_bias": False, "use_sliding_window": False},
    default_theta=2_000_000.0,
    prepared=_prepared,
    written=_written,
)

SMOLLM3 = decoder_family("smollm3", FLAVORS, check, Smollm3, FORMAT.hugging_face("smollm3", "SmolLM3ForCausalLM"))
