"""A variant of Llama 3: each layer mixes the values of the first layer into its own, by a learned scalar.

Zhou et al., "Value Residual Learning For Alleviating Attention Concentration In Transformers", 2024. Use it with

    [job]
    plugins = ["value_residual.py"]
    [model]
    family = "value_residual"
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import titanlite
from titanlite.models import decoder, layers
from titanlite.models.family import Init
from titanlite.models.llama3 import LLAMA3, Llama3


class Attention(layers.Attention):
    def forward(self, x: Tensor, rope: Any, mask: Any, first: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """first: the values of the first layer, in any shape; returned in that of this layer's values."""
        queries, keys, values = self.heads(x, rope)
        if self.mix is None:
            return self.attended(queries, keys, values, mask), values
        values = values + self.mix() * (first.reshape(values.shape) - values)
        return self.attended(queries, keys, values, mask), first


class Block(decoder.Block):
    def forward(self, x: Tensor, rope: Any, mask: Any, first: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        attended, first = self.attention(self.attention_norm(x), rope, mask, first)
        return x + attended + self.feed_forward(self.ffn_norm(x + attended)), first


class ValueResidual(Llama3):
    def run_blocks(self, x: Tensor, *arguments: Any) -> Tensor:
        """A stage of a pipeline passes the residual stream and the values of the first layer as one tensor."""
        width = self.config.n_kv_heads * self.config.head_dim
        if self.tok_embeddings is None:
            x, first = x.split((self.config.dim, width), dim=-1)
        else:
            first = x.new_zeros(*x.shape[:2], width)
        for layer in self.layers.values():
            x, first = layer(x, *arguments, first)
        return x if self.output is not None else torch.cat((x, first.reshape(*x.shape[:2], width)), dim=-1)


def build(config: Any) -> ValueResidual:
    def block(index: int) -> Block:
        attention = Attention(config.dim, config.n_heads, config.n_kv_heads, config.head_dim)
        attention.mix = layers.Scalar() if index else None
        return Block(config, attention)

    return ValueResidual(config, block)


titanlite.register_family(
    replace(
        LLAMA3,
        name="value_residual",
        build=build,
        structure=lambda config: decoder.decoder_structure(
            config, {**decoder.TENSOR_STYLES, "layers.*.attention.mix": "scalar"}
        ),
        init=lambda config, name: Init("constant", 0.5) if "mix" in name else decoder.init(config, name),
        boundary=lambda config: config.dim + config.n_kv_heads * config.head_dim,
        hugging_face=None,
    )
)
