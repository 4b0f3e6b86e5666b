"""Llama 3 (Grattafiori et al., "The Llama 3 Herd of Models", 2024): the decoder with Llama 3.1's rotary scaling."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from titanlite.models.decoder import Block, Decoder, HyperParameters, check_decoder, check_width, decoder_family
from titanlite.models.hugging_face import DecoderFormat, Scaling
from titanlite.models.layers import Attention, Llama3Scaling
from titanlite.runtime.errors import Problem, Rules
from titanlite.runtime.settings import Needs


@dataclass(frozen=True)
class Llama3Config(HyperParameters):
    """Hyper-parameters of the llama3 family. Each may be given in [model] and overrides the flavor's value."""

    rope_theta: float = 500_000.0
    max_seq_len: int = 131_072
    rope_scaling_factor: float = 1.0
    """Factor by which Llama 3.1's scaling stretches long rotary wavelengths; 1.0: no scaling."""
    rope_low_freq_factor: float = 1.0
    """Wavelengths above rope_original_seq_len / rope_low_freq_factor are stretched by the full factor."""
    rope_high_freq_factor: float = 4.0
    """Wavelengths below rope_original_seq_len / rope_high_freq_factor are not stretched."""
    rope_original_seq_len: int = 8192
    """Context length before the scaling."""


_VOCAB_SIZE = 128_256

_LLAMA_3_2_1B = Llama3Config(
    dim=2048,
    n_layers=16,
    n_heads=32,
    n_kv_heads=8,
    ffn_dim=8192,
    vocab_size=_VOCAB_SIZE,
    rope_scaling_factor=32.0,
    tie_embeddings=True,
)
_LLAMA_3_1_8B = Llama3Config(
    dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14_336, vocab_size=_VOCAB_SIZE, rope_scaling_factor=8.0
)

FLAVORS = {
    "debug": Llama3Config(dim=256, n_layers=6, n_heads=16, n_kv_heads=16, ffn_dim=768, vocab_size=2000),
    "1B": _LLAMA_3_2_1B,
    "3B": replace(_LLAMA_3_2_1B, dim=3072, n_layers=28, n_heads=24),
    "8B": _LLAMA_3_1_8B,
    "70B": replace(_LLAMA_3_1_8B, dim=8192, n_layers=80, n_heads=64, ffn_dim=28_672),
    "405B": replace(_LLAMA_3_1_8B, dim=16_384, n_layers=126, n_heads=128, ffn_dim=53_248),
}
"""Published sizes (1B and 3B: Llama 3.2; 8B, 70B and 405B: Llama 3.1), and a debug size for a laptop."""


class Llama3(Decoder):
    """The decoder with Llama 3.1's rotary scaling. block, carried: see Decoder; None: the block of Llama 3."""

    def __init__(
        self, config: Llama3Config, block: Callable[[int], nn.Module] | None = None, *, carried: int = 0
    ) -> None:
        scaling = Llama3Scaling(
            config.rope_scaling_factor,
            config.rope_low_freq_factor,
            config.rope_high_freq_factor,
            config.rope_original_seq_len,
        )
        super().__init__(config, block or (lambda _: Block(config, attention(config))), scaling, carried=carried)


def attention(config: Llama3Config) -> Attention:
    """Attention module of one block."""
    return Attention(config.dim, config.n_heads, config.n_kv_heads, config.head_dim)


def check(config: Llama3Config, seq_len: int, tp: int, pp: int) -> list[Problem]:
    rules = Rules("model", config, [*check_decoder(config, seq_len, tp, pp), *check_width(config)])
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    rule = f"below model.rope_high_freq_factor = {high}"
    rules.require("rope_low_freq_factor", low < high, rule, "1.0 and 4.0 are what Llama 3.1 uses")
    return rules.problems


FORMAT = DecoderFormat(
    Llama3Config,
    check,
    supported={"mlp_bias": False},
    scaling=Scaling(
        "llama3",
        {
            "rope_scaling_factor": "factor",
            "rope_low_freq_factor": "low_freq_factor",
            "rope_high_freq_factor": "high_freq_factor",
            "rope_original_seq_len": "original_max_position_embeddings",
        },
    ),
)

_SCALES = Needs("model.rope_scaling_factor above 1", lambda config: config.rope_scaling_factor > 1)
NEEDS = dict.fromkeys(("rope_low_freq_factor", "rope_high_freq_factor", "rope_original_seq_len"), _SCALES)
"""See Needs."""

LLAMA3 = decoder_family("llama3", FLAVORS, check, Llama3, FORMAT.hugging_face("llama", "LlamaForCausalLM"), needs=NEEDS)
