"""A variant of Qwen3, with norms of queries and keys, a squared ReLU, and logits capped at 15. Use it with

[job]
plugins = ["capped.py"]
[model]
family = "capped"
"""

from torch import Tensor, nn

import titanlite
from titanlite.models.decoder import Block
from titanlite.models.parts import Column, Row
from titanlite.models.qwen3 import QWEN3, Qwen3, Qwen3Config, attention


class SquaredReLU(nn.Module):
    """w2(relu(w1 x)^2) (So et al., "Primer", 2021)."""

    gathers = True

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = Column(dim, hidden_dim, bias=False)
        self.w2 = Row(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(self.w1(x).relu().square())
        return out


def build(config: Qwen3Config) -> Qwen3:
    model = Qwen3(config, lambda _: Block(config, attention(config), SquaredReLU(config.dim, config.ffn_dim)))
    assert model.output is not None
    model.output.soft_cap = 15.0
    return model


titanlite.register_family(QWEN3.variant("capped", build))
