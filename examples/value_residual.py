"""A variant of Llama 3: each layer mixes the values of the first layer into its own, by a learned scalar.

Zhou et al., "Value Residual Learning For Alleviating Attention Concentration In Transformers", 2024. Use it with

    [job]
    plugins = ["value_residual.py"]
    [model]
    family = "value_residual"
"""

from typing import Any

from torch import Tensor

import titanlite
from titanlite.models import decoder, layers
from titanlite.models.family import Init
from titanlite.models.llama3 import LLAMA3, Llama3
from titanlite.models.parts import Role


class Attention(layers.Attention):
    def forward(self, x: Tensor, rope: Any, mask: Any, first: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        queries, keys, values = self.heads(x, rope)
        if self.mix is None:
            return self.attended(queries, keys, values, mask), values
        mixed = values + self.mix() * (first.reshape(values.shape) - values)
        return self.attended(queries, keys, mixed, mask), first


class Block(decoder.Block):
    def forward(self, x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        attended, first = self.attention(self.attention_norm(x), *arguments)
        return x + attended + self.feed_forward(self.ffn_norm(x + attended)), first


def build(config: Any) -> Llama3:
    def block(index: int) -> Block:
        attention = Attention(config.dim, config.n_heads, config.n_kv_heads, config.head_dim)
        attention.mix = layers.Scalar(role=Role(Init("constant", 0.5))) if index else None
        return Block(config, attention)

    return Llama3(config, block, carried=config.n_kv_heads * config.head_dim)


titanlite.register_family(
    LLAMA3.variant("value_residual", build, boundary=lambda config: config.dim + config.n_kv_heads * config.head_dim)
)
