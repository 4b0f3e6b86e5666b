"""Hyper-parameters of Llama 3, its published sizes, and what follows from them by arithmetic."""

import math
from dataclasses import dataclass, fields, replace

from titanlite.models.sizes import size_alike
from titanlite.runtime.errors import Problem, require


@dataclass(frozen=True)
class Llama3Config:
    """Hyper-parameters of the llama3 family. Each may be given in [model], over the flavor's own value."""

    dim: int
    """Width of the residual stream."""
    n_layers: int
    """Number of transformer blocks."""
    n_heads: int
    """Query heads; each is dim / n_heads wide."""
    n_kv_heads: int
    """Key/value heads, each shared by n_heads / n_kv_heads query heads."""
    ffn_dim: int
    """Width of the feed-forward's hidden layer."""
    vocab_size: int
    """Rows of the embedding and of the output, at least the tokenizer's vocabulary."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    rope_theta: float = 500_000.0
    """Base of the rotary wavelengths."""
    rope_scaling_factor: float = 1.0
    """How far Llama 3.1's scaling stretches long rotary wavelengths; 1.0: no scaling."""
    rope_low_freq_factor: float = 1.0
    """Wavelengths above rope_original_seq_len / this are stretched in full."""
    rope_high_freq_factor: float = 4.0
    """Wavelengths below rope_original_seq_len / this are not stretched."""
    rope_original_seq_len: int = 8192
    """Context length that the scaling starts from."""
    max_seq_len: int = 131_072
    """Longest sequence: the length of the rotary tables."""
    tie_embeddings: bool = False
    """The output layer uses the embedding's weights."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads


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
    dim=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=8,
    ffn_dim=14_336,
    vocab_size=_VOCAB_SIZE,
    rope_scaling_factor=8.0,
)

FLAVORS = {
    "debug": Llama3Config(dim=256, n_layers=6, n_heads=16, n_kv_heads=16, ffn_dim=768, vocab_size=2000),
    "1B": _LLAMA_3_2_1B,
    "3B": replace(_LLAMA_3_2_1B, dim=3072, n_layers=28, n_heads=24),
    "8B": _LLAMA_3_1_8B,
    "70B": replace(_LLAMA_3_1_8B, dim=8192, n_layers=80, n_heads=64, ffn_dim=28_672),
    "405B": replace(_LLAMA_3_1_8B, dim=16_384, n_layers=126, n_heads=128, ffn_dim=53_248),
}
"""Published sizes (1B and 3B: Llama 3.2; 8B, 70B and 405B: Llama 3.1), and one for a laptop."""


def num_matmul_parameters(config: Llama3Config) -> int:
    """Weights that every token is multiplied with: all but the norms' and the embedding lookup's.

    The output layer counts, tied or not.
    """
    kv_dim = config.n_kv_heads * config.head_dim
    attention = 2 * config.dim * config.dim + 2 * config.dim * kv_dim
    feed_forward = 3 * config.dim * config.ffn_dim
    return config.n_layers * (attention + feed_forward) + config.vocab_size * config.dim


def num_parameters(config: Llama3Config) -> int:
    """All parameters; a tied one counts once."""
    embedding = 0 if config.tie_embeddings else config.vocab_size * config.dim
    norms = (2 * config.n_layers + 1) * config.dim
    return num_matmul_parameters(config) + embedding + norms


def flops_per_token(config: Llama3Config, seq_len: int) -> int:
    """Floating-point operations of matrix products per trained token, forward and backward: 6N + 12·L·T·dim.

    N is num_matmul_parameters: 2 operations per weight forward, 4 backward. Attention multiplies each query with T keys
    and T values in each of L layers, 4·T·dim operations forward and twice that backward; the triangle that a causal
    kernel may skip is counted in full, as is usual for MFU, and recomputation is not counted.
    Source: Chowdhery et al., "PaLM" (2022), appendix B.
    """
    return 6 * num_matmul_parameters(config) + 12 * config.n_layers * seq_len * config.dim


def unit_flops_per_token(config: Llama3Config, seq_len: int, unit: str) -> int:
    """The share of one unit of the plan, by the name of its first module, in `flops_per_token`."""
    output = 6 * config.vocab_size * config.dim
    if unit.startswith("layers."):
        return (flops_per_token(config, seq_len) - output) // config.n_layers
    holds_output = unit == "norm" or config.tie_embeddings
    return output if holds_output else 0


_TINY_HEAD_DIM = 8


def shrink(config: Llama3Config, ranks: int) -> Llama3Config:
    """A tiny model of the same kind, see Family. Of several query heads per key/value head two remain."""
    n_kv_heads = math.gcd(config.n_kv_heads, ranks)
    n_heads = n_kv_heads * min(config.n_heads // config.n_kv_heads, 2)
    dim = n_heads * min(config.head_dim, _TINY_HEAD_DIM)
    return replace(
        config,
        dim=dim,
        n_layers=min(config.n_layers, 2 * ranks),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        ffn_dim=size_alike(config.ffn_dim, 2 * dim, ranks),
    )


_SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "rope_original_seq_len", "max_seq_len")
_POSITIVE_AND_FINITE = ("norm_eps", "rope_low_freq_factor", "rope_high_freq_factor")


def check(config: Llama3Config, seq_len: int, tp: int, pp: int) -> list[Problem]:
    """What is wrong with these hyper-parameters, for training on sequences of `seq_len` tokens on these degrees."""
    problems: list[Problem] = []
    for name in _SIZES:
        value = getattr(config, name)
        problems += require(value >= 1, f"model.{name}", value, "at least 1", "a positive number")
    for name in _POSITIVE_AND_FINITE:
        value = getattr(config, name)
        ok = 0.0 < value < math.inf
        problems += require(ok, f"model.{name}", value, "above 0 and finite", _default_remedy(name))
    return problems + _check_heads(config) + _check_rope(config, seq_len) + _check_layout(config, tp, pp)


def _default_remedy(name: str) -> str:
    default = next(field.default for field in fields(Llama3Config) if field.name == name)
    return f"{default} is what Llama 3 uses"


def _check_heads(config: Llama3Config) -> list[Problem]:
    if min(config.dim, config.n_heads, config.n_kv_heads) < 1:
        return []  # reported already; divisibility means nothing here
    problems = require(
        config.n_heads % config.n_kv_heads == 0,
        "model.n_kv_heads",
        config.n_kv_heads,
        f"divides model.n_heads = {config.n_heads}",
        f"one of {', '.join(map(str, _divisors(config.n_heads)))}",
    )
    if config.dim % config.n_heads:
        pairs = 2 * config.n_heads
        return problems + require(
            False,
            "model.dim",
            config.dim,
            f"a multiple of model.n_heads = {config.n_heads}",
            f"{math.ceil(config.dim / pairs) * pairs} is the next one with an even head width",
        )
    return problems + require(
        config.head_dim % 2 == 0,
        "model.dim",
        config.dim,
        f"dim / n_heads is even, since rotary embeddings turn pairs (here {config.head_dim})",
        f"{config.dim + config.n_heads}, or another number of heads",
    )


def _check_layout(config: Llama3Config, tp: int, pp: int) -> list[Problem]:
    """What tensor parallelism cuts is divisible; what a pipeline puts on different stages is not shared."""
    problems: list[Problem] = []
    for name in ("n_heads", "n_kv_heads", "ffn_dim"):
        value = getattr(config, name)
        problems += require(
            tp < 1 or value < 1 or value % tp == 0,
            f"model.{name}",
            value,
            f"a multiple of parallelism.tp = {tp}, whose ranks share it evenly",
            f"parallelism.tp = {math.gcd(value, tp)}, or model.{name} = {math.ceil(value / max(tp, 1)) * tp}",
        )
    return problems + require(
        pp <= 1 or not config.tie_embeddings,
        "model.tie_embeddings",
        config.tie_embeddings,
        f"false with parallelism.pp = {pp}: the embedding is on the first stage, the output on the last",
        "parallelism.pp = 1 with dp_shard or tp instead, or model.tie_embeddings = false",
    )


def _check_rope(config: Llama3Config, seq_len: int) -> list[Problem]:
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    return [
        *require(
            1.0 < config.rope_theta < math.inf,
            "model.rope_theta",
            config.rope_theta,
            "above 1 and finite",
            _default_remedy("rope_theta"),
        ),
        *require(
            1.0 <= config.rope_scaling_factor < math.inf,
            "model.rope_scaling_factor",
            config.rope_scaling_factor,
            "at least 1 and finite",
            "1.0 for no scaling, 8.0 as Llama 3.1",
        ),
        *require(
            low < high,
            "model.rope_low_freq_factor",
            low,
            f"below model.rope_high_freq_factor = {high}",
            "1.0 and 4.0 are what Llama 3.1 uses",
        ),
        *require(
            seq_len <= config.max_seq_len,
            "training.seq_len",
            seq_len,
            f"at most model.max_seq_len = {config.max_seq_len}",
            "shorten the sequences or raise model.max_seq_len",
        ),
    ]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
