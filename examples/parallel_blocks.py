"""A variant in ten lines: Llama 3 with attention and feed-forward side by side (Wang, Komatsuzaki, "GPT-J-6B", 2021).

[job]
plugins = ["parallel_blocks.py"]
[model]
family = "parallel_blocks"
"""

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


titanlite.register_family(LLAMA3.variant("parallel_blocks", build))
