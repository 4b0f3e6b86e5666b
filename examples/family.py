"""A model family: Llama 3 with a feed-forward of two matrices and the squared ReLU, w2(relu(w1 x)^2).

So et al., "Primer: Searching for Efficient Transformers for Language Modeling", 2021. Use it with

    [job]
    plugins = ["family.py"]
    [model]
    family = "primer"
"""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

import titanlite
from titanlite.models.decoder import Block, Decoder, HyperParameters, check_decoder, check_width, decoder_structure
from titanlite.models.family import Family
from titanlite.models.layers import Attention
from titanlite.models.parts import Column, Row
from titanlite.runtime.errors import Problem


@dataclass(frozen=True)
class PrimerConfig(HyperParameters):
    """Hyper-parameters of the primer family: those of all decoders. Add others as fields; the text below one is its
    help."""


class SquaredReLU(nn.Module):
    """w2(relu(w1 x)^2). Tensor parallelism cuts w1 by its output and w2 by its input, of entire rows."""

    gathers = True

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = Column(dim, hidden_dim, bias=False)
        self.w2 = Row(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seq_len, dim). Returns the same shape."""
        out: Tensor = self.w2(functional.relu(self.w1(x)).square())
        return out


def build(config: PrimerConfig) -> Decoder:
    def block(_index: int) -> Block:
        attention = Attention(config.dim, config.n_heads, config.n_kv_heads, config.head_dim)
        return Block(config, attention, SquaredReLU(config.dim, config.ffn_dim))

    return Decoder(config, block)


def check(config: PrimerConfig, seq_len: int, tp: int, pp: int) -> list[Problem]:
    return [*check_decoder(config, seq_len, tp, pp), *check_width(config)]


def flops_per_token(config: PrimerConfig, seq_len: int) -> int:
    """6 operations per weight that multiplies a token, and attention's 12 per layer, position and feature."""
    block = 2 * config.dim * (config.n_heads + config.n_kv_heads) * config.head_dim + 2 * config.dim * config.ffn_dim
    weights = config.n_layers * block + config.vocab_size * config.dim
    return 6 * weights + 12 * config.n_layers * seq_len * config.dim


titanlite.register_family(
    Family(
        name="primer",
        config_type=PrimerConfig,
        flavors={
            "debug": PrimerConfig(dim=128, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=512, vocab_size=2000),
            "100M": PrimerConfig(dim=768, n_layers=12, n_heads=12, n_kv_heads=12, ffn_dim=3072, vocab_size=32_000),
        },
        check=check,
        build=build,
        structure=decoder_structure,
        flops_per_token=flops_per_token,
    )
)
