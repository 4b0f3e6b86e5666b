"""A plugin with variants of families of which parallelism could drop or replace a part."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import titanlite
from titanlite.models import layers, qwen3
from titanlite.models.attention import additive_mask
from titanlite.models.decoder import Block
from titanlite.models.deepseek_v3 import DEEPSEEK_V3, DeepseekV3
from titanlite.models.experts import MixtureOfExperts
from titanlite.models.family import Init
from titanlite.models.llama3 import LLAMA3, Llama3
from titanlite.models.mixer import Mixer
from titanlite.models.parts import Column, Role, Row
from titanlite.models.qwen3 import Qwen3
from titanlite.models.qwen3_5 import QWEN3_5, Qwen35
from titanlite.models.qwen3_moe import QWEN3_MOE


def capped(queries: Tensor, keys: Tensor, values: Tensor, mask: Any) -> Tensor:
    """Attention with capped scores: each query by its own mask, each head alone."""
    groups = queries.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(groups, dim=1) for each in (keys, values))
    if mask is None:
        mask = additive_mask(torch.zeros_like(queries[:, 0, :, 0], dtype=torch.int64), queries.dtype)
    scores = 0.5 * torch.tanh(queries @ keys.transpose(-2, -1))
    return (scores + mask).softmax(-1) @ values


class Method(layers.Attention):
    def attend(self, *arguments: Any) -> Tensor:
        return capped(*arguments)


def without_mask(queries: Tensor, keys: Tensor, values: Tensor, mask: Any) -> Tensor:
    """Right for entire rows only."""
    del mask
    return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)


def across_heads(queries: Tensor, keys: Tensor, values: Tensor, mask: Any) -> Tensor:
    attended = capped(queries, keys, values, mask)
    return attended + attended.mean(dim=1, keepdim=True)


class Uncalled(layers.Attention):
    def attended(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Any) -> Tensor:
        heads = (each.transpose(1, 2) for each in (queries, keys, values))
        return self.wo(without_mask(*heads, mask).transpose(1, 2).flatten(2))


class OwnCore(layers.Attention):
    """Its heads interact."""

    def core(self, inputs: Any, seen: Any, by_head: Any) -> Tensor:
        out = super().core(inputs, seen, by_head)
        return out + out.mean(dim=2, keepdim=True)


class FewHeads(Mixer):
    """Fewer heads than ranks in one input and in one parameter, and inputs of different dtypes."""

    gathers = True

    def __init__(self, dim: int, n_heads: int, _n_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.rates, self.wv = Column(dim, 1), Column(dim, n_heads * head_dim)
        self.strength = layers.OfHeads(1, Role(Init("constant", 0.5)))
        self.wo = Row(n_heads * head_dim, dim)

    def forward(self, x: Tensor, _rope: Any, mask: Any) -> Tensor:
        narrow = x.detach().mean(-1).float()[..., None, None]
        inputs = self.rates(x).unsqueeze(-1), narrow, self.wv(x).unflatten(-1, (-1, self.head_dim))
        out: Tensor = self.wo(self.core(inputs, mask, {"strength": self.strength()}).flatten(2))
        return out

    def core(self, inputs: Any, seen: Any, by_head: Any) -> Tensor:  # noqa: ARG002
        rates, narrow, values = inputs
        sums: Tensor = (
            (values * rates.exp() * narrow.sin()).cumsum(1) * by_head["strength"].unsqueeze(-1) / values.shape[1]
        )
        return sums


class Shared(layers.Attention):
    """Adds the values of the first layer, which the model keeps aside."""

    kept: list[Tensor]

    def attended(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Any) -> Tensor:
        self.kept.append(values)
        return super().attended(queries, keys, values + self.kept[0], mask)


class KeepsAside(Llama3):
    def run_blocks(self, x: Tensor, *arguments: Any) -> Tensor:
        kept: list[Tensor] = []
        for layer in self.layers.values():
            layer.attention.kept = kept
            x = layer(x, *arguments)
        return x


class Shifted(layers.Attention):
    """Its projections see the position before, too."""

    def forward(self, x: Tensor, rope: Any, mask: Any) -> Tensor:
        return super().forward(x + 0.5 * functional.pad(x, (0, 0, 1, -1)), rope, mask)


class Smear(Block):
    """Mixes the residual stream of the position before into each one."""

    def forward(self, x: Tensor, *arguments: Any) -> Tensor:
        out: Tensor = super().forward(x + 0.5 * functional.pad(x, (0, 0, 1, -1)), *arguments)
        return out


class Scaled(Llama3):
    """Scales the embeddings, and so what each stage gets."""

    def run_blocks(self, x: Tensor, *arguments: Any) -> Tensor:
        return super().run_blocks(2 * x, *arguments)


class Biased(Block):
    """Biases of all products."""

    def __init__(self, config: Any, attention: layers.Attention) -> None:
        super().__init__(config, attention)
        for module in (*attention.children(), *self.feed_forward.children()):
            module.bias = nn.Parameter(torch.empty(module.out_features))
            module.roles = {**module.roles, "bias": Role(Init("constant", 0.1), optimizer="vector")}


class Mixture(MixtureOfExperts):
    """The losses of its routers are over rows, which context parallelism knows."""


def add_mixture() -> None:
    def build(config: Any) -> Qwen3:
        return Qwen3(config, lambda _: Block(config, qwen3.attention(config), Mixture(config)))

    titanlite.register_family(QWEN3_MOE.variant("mixture", build))


def add(
    name: str,
    kind: type = layers.Attention,
    attend: Any = None,
    model: type = Llama3,
    block_kind: type = Block,
    **changes: Any,
) -> None:
    def build(config: Any) -> Llama3:
        def block(_index: int) -> Block:
            attention = kind(config.dim, config.n_heads, config.n_kv_heads, config.head_dim)
            if attend is not None:
                attention.attend = attend
            return block_kind(config, attention)

        return model(config, block)

    titanlite.register_family(LLAMA3.variant(name, build, **changes))


add_mixture()
titanlite.register_family(DEEPSEEK_V3.variant("latent", DeepseekV3))
titanlite.register_family(QWEN3_5.variant("hybrid", Qwen35))
add("capped", attend=capped)
add("method", Method)
add("without_mask", attend=without_mask)
add("across_heads", attend=across_heads)
add("own_core", OwnCore)
add("few_heads", FewHeads)
add("uncalled", Uncalled)
add("keeps_aside", Shared, model=KeepsAside)
add("shifted", Shifted)
add("smear", block_kind=Smear)
add("scaled", model=Scaled)
add("biased", block_kind=Biased)
