"""Hyper-parameters of Qwen3, its published dense sizes, and the rules for them."""

from dataclasses import dataclass, replace

from titanlite.models.decoder.config import TINY_HEAD_DIM, check_decoder, check_sizes, shrunk_counts, shrunk_widths
from titanlite.models.sizes import size_alike
from titanlite.runtime.errors import Problem, require


@dataclass(frozen=True)
class Qwen3Config:
    """Hyper-parameters of the qwen3 family. Each may be given in [model], over the flavor's own value."""

    dim: int
    """Width of the residual stream."""
    n_layers: int
    """Number of transformer blocks."""
    n_heads: int
    """Query heads."""
    n_kv_heads: int
    """Key/value heads, each shared by n_heads / n_kv_heads query heads."""
    ffn_dim: int
    """Width of the feed-forward's hidden layer."""
    vocab_size: int
    """Rows of the embedding and of the output, at least the tokenizer's vocabulary."""
    head_dim: int = 128
    """Width of each head; all together need not be as wide as the residual stream."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm, also in that of queries and keys."""
    rope_theta: float = 1_000_000.0
    """Base of the rotary wavelengths."""
    max_seq_len: int = 40_960
    """Longest sequence: the length of the rotary tables."""
    tie_embeddings: bool = False
    """The output layer uses the embedding's weights."""


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
"""Published dense sizes, and one for a laptop.

max_seq_len is that of the models after post-training; the folders of the base models say 32,768, with which they
compute the same.
"""


def shrink(config: Qwen3Config, ranks: int) -> Qwen3Config:
    """A tiny model of the same kind, see Family: its heads are not as wide as the residual stream either."""
    head_dim = min(config.head_dim, TINY_HEAD_DIM)
    dim = size_alike(config.dim, 3 * head_dim, ranks)
    return replace(config, head_dim=head_dim, **shrunk_counts(config, ranks), **shrunk_widths(config, dim, ranks))


def check(config: Qwen3Config, seq_len: int, tp: int, pp: int) -> list[Problem]:
    """What is wrong with these hyper-parameters, for training on sequences of `seq_len` tokens on these degrees."""
    return [
        *check_decoder(config, seq_len, tp, pp, published="Qwen3"),
        *check_sizes(config, ["head_dim"]),
        *require(
            config.head_dim < 1 or config.head_dim % 2 == 0,
            "model.head_dim",
            config.head_dim,
            "even, since rotary embeddings turn pairs",
            f"{config.head_dim + 1}, or 128 as all of Qwen3",
        ),
    ]
