"""Qwen3, dense (Qwen Team, "Qwen3 Technical Report", 2025): the decoder with an independent head width, and with
RMSNorm on each head of queries and keys before the rotation."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from titanlite.models.decoder import Block, Decoder, HyperParameters, check_decoder, check_head_width, decoder_family
from titanlite.models.hugging_face import HEAD_NORM_NAMES, YARN, DecoderFormat, without_unused_window
from titanlite.models.layers import Attention, RMSNorm, YarnScaling
from titanlite.runtime.errors import Problem, Rules
from titanlite.runtime.settings import Needs


@dataclass(frozen=True)
class Qwen3Config(HyperParameters):
    """Hyper-parameters of the qwen3 family. Each may be given in [model] and overrides the flavor's value."""

    head_dim: int = 128
    """Width of each head; n_heads x head_dim may differ from dim."""
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    max_seq_len: int = 40_960
    rope_scaling_factor: float = 1.0
    """Factor by which YaRN stretches long rotary wavelengths; 1.0: no scaling."""
    rope_beta_fast: float = 32.0
    """Pairs that make more turns than this within rope_original_seq_len are not stretched."""
    rope_beta_slow: float = 1.0
    """Pairs that make fewer turns than this within rope_original_seq_len are stretched by the full factor."""
    rope_original_seq_len: int = 32_768
    """Context length before the scaling."""


_SMALL = Qwen3Config(
    dim=1024, n_layers=28, n_heads=16, n_kv_heads=8, ffn_dim=3072, vocab_size=151_936, tie_embeddings=True
)
_LARGE = Qwen3Config(dim=4096, n_layers=36, n_heads=32, n_kv_heads=8, ffn_dim=12_288, vocab_size=151_936)

FLAVORS = {
    "debug": Qwen3Config(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=768, vocab_size=2000, head_dim=64),
    "0.6B": _SMALL,
    "1.7B": replace(_SMALL, dim=2048, ffn_dim=6144),
    "4B": replace(_SMALL, dim=2560, n_layers=36, n_heads=32, ffn_dim=9728),
    "8B": _LARGE,
    "14B": replace(_LARGE, dim=5120, n_layers=40, n_heads=40, ffn_dim=17_408),
    "32B": replace(_LARGE, dim=5120, n_layers=64, n_heads=64, ffn_dim=25_600),
}
"""Published dense sizes, and a debug size for a laptop.

max_seq_len is that of the post-trained models. The base models' config.json has 32,768; up to that length both compute
the same.
"""


class Qwen3(Decoder):
    """The decoder with an independent head width, RMSNorm on each head of queries and keys, and YaRN if its factor is
    above 1. block: see Decoder; None: that of Qwen3."""

    def __init__(self, config: Qwen3Config, block: Callable[[int], nn.Module] | None = None) -> None:
        super().__init__(config, block or (lambda _: Block(config, attention(config))), yarn(config))


def yarn(config: Any) -> YarnScaling | None:
    """The scaling of a family with the hyper-parameters rope_*; None if it changes nothing."""
    if config.rope_scaling_factor <= 1.0:
        return None
    turns = (config.rope_beta_fast, config.rope_beta_slow)
    return YarnScaling(config.rope_scaling_factor, config.rope_theta, *turns, config.rope_original_seq_len)


def attention(config: Qwen3Config) -> Attention:
    """Attention module of one block."""
    norms = [RMSNorm(config.head_dim, config.norm_eps) for _ in range(2)]
    return Attention(config.dim, config.n_heads, config.n_kv_heads, config.head_dim, *norms)


def check(config: Qwen3Config, seq_len: int, tp: int, pp: int) -> list[Problem]:
    return [*check_decoder(config, seq_len, tp, pp), *check_head_width(config), *check_yarn(config)]


def check_yarn(config: Any) -> list[Problem]:
    """Problems of the hyper-parameters of YaRN."""
    rules = Rules("model", config)
    slow, fast = config.rope_beta_slow, config.rope_beta_fast
    rule = f"below model.rope_beta_fast = {fast}"
    rules.require("rope_beta_slow", slow < fast, rule, "1.0 and 32.0 are usual")
    return rules.problems


FORMAT = DecoderFormat(
    Qwen3Config,
    check,
    block_names=HEAD_NORM_NAMES,
    supported={"use_sliding_window": False},
    scaling=YARN,
    prepared=without_unused_window,
)

_SCALES = Needs("model.rope_scaling_factor above 1", lambda config: config.rope_scaling_factor > 1)
NEEDS = dict.fromkeys(("rope_beta_fast", "rope_beta_slow", "rope_original_seq_len"), _SCALES)
"""See Needs."""

QWEN3 = decoder_family("qwen3", FLAVORS, check, Qwen3, FORMAT.hugging_face("qwen3", "Qwen3ForCausalLM"), needs=NEEDS)
