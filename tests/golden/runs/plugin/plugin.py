"""A plugin of a stored run: Llama 3 with attention and feed-forward side by side, and a term of the loss."""

from dataclasses import replace
from typing import Any

from torch import Tensor

import titanlite
from titanlite.models.decoder import Block
from titanlite.models.llama3 import LLAMA3, Llama3, attention


class ParallelBlock(Block):
    def forward(self, x: Tensor, *arguments: Any) -> Tensor:
        return x + self.attention(self.attention_norm(x), *arguments) + self.feed_forward(self.ffn_norm(x))


def build(config: Any) -> Llama3:
    return Llama3(config, lambda _: ParallelBlock(config, attention(config)))


def squared_logsumexp(logits: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG001
    return 1e-2 * logits.logsumexp(dim=1).square()


NAMES = replace(LLAMA3.exported, model_type="golden_parallel", architecture="GoldenParallelForCausalLM")
titanlite.register_family(LLAMA3.variant("golden_parallel", build, hugging_face=NAMES))
titanlite.register_term("golden_z", squared_logsumexp)
