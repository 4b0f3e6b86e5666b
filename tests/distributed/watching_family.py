"""A plugin that notes values in each place that can: block, feed-forward, attention, a term of the loss, an update."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import titanlite
from titanlite.models import decoder, layers
from titanlite.models.attention import attend
from titanlite.models.llama3 import LLAMA3, Llama3, attention


def entropies(queries: Tensor, keys: Tensor, mask: Any) -> Tensor:
    """Of the attention of each query, in nats, the mean over the heads: (batch, queries)."""
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    scores = (queries @ keys.mT / queries.shape[-1] ** 0.5).detach()
    visible = torch.full_like(scores, -torch.inf).triu(1) if mask is None else mask
    return torch.special.entr((scores + visible).softmax(-1)).sum(-1).mean(1)


def attend_and_note(queries: Tensor, keys: Tensor, values: Tensor, mask: Any) -> Tensor:
    titanlite.watch("entropy", entropies(queries, keys, mask))
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


titanlite.register_family(replace(LLAMA3, name="watching", build=build, hugging_face=None))
titanlite.register_term("noting", note_logsumexp, of="logsumexp")
titanlite.register_statistic("updates", updates)
