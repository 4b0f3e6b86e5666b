"""A plugin that notes values in each place that can: block, feed-forward, attention, a term of the loss, an update."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn, special

import titanlite
from titanlite.models import decoder, layers
from titanlite.models.attention import attend, attention_weights
from titanlite.models.llama3 import LLAMA3, Llama3, attention


def attend_and_note(queries: Tensor, keys: Tensor, values: Tensor, mask: Any) -> Tensor:
    titanlite.watch("entropy", special.entr(attention_weights(queries, keys, mask)).sum(-1).mean(1))
    return attend(queries, keys, values, mask)


class Block(decoder.Block):
    def forward(self, x: Tensor, *arguments: Any) -> Tensor:
        self.watch("residual", x.square().mean(-1))
        out: Tensor = super().forward(x, *arguments)
        return out


class FeedForward(layers.FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        self.watch("input", x.sum(-1), index=self.layer)
        return super().forward(x)


def build(config: Any) -> Llama3:
    def block(index: int) -> Block:
        own, feed_forward = attention(config), FeedForward(config.dim, config.ffn_dim)
        feed_forward.layer = index
        if index == 1:
            own.attend = attend_and_note
        return Block(config, own, feed_forward)

    return Llama3(config, block)


def note_logsumexp(logsumexp: Tensor, labels: Tensor) -> Tensor:
    titanlite.watch("logsumexp", logsumexp, labels)
    return logsumexp * 0


@contextmanager
def updates(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        titanlite.watch(f"norm/{name}", parameter.grad.square() * parameter.numel(), root=True)
    yield
    for name, parameter in parameters.items():
        change = parameter.detach() - before[name]
        titanlite.watch(f"update/{name}", change.square(), per=before[name].square(), root=True)


titanlite.register_family(LLAMA3.variant("watching", build))
titanlite.register_term("noting", note_logsumexp, of="logsumexp")
titanlite.register_statistic("updates", updates)
