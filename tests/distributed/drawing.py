"""Model families that draw random numbers, for tests only: llama3 with dropout after attention and feed-forward."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from titanlite.models.attention import AttentionMask
from titanlite.models.decoder import Block
from titanlite.models.layers import RotaryTables
from titanlite.models.llama3 import LLAMA3, Llama3, Llama3Config, attention
from titanlite.models.randomness import dropout
from titanlite.models.registry import FAMILIES

P = 0.25


class DrawingBlock(Block):
    """Block with dropout. site: name of the block in the model; None: draw from torch's generators."""

    def __init__(self, config: Llama3Config, site: str | None) -> None:
        super().__init__(config, attention(config))
        self.site = site

    def forward(
        self, x: Tensor, rope: RotaryTables, mask: AttentionMask | None, row_keys: Tensor | None = None
    ) -> Tensor:
        x = x + self.drop(self.attention(self.attention_norm(x), rope, mask), "attention", row_keys)
        return x + self.drop(self.feed_forward(self.ffn_norm(x)), "feed_forward", row_keys)

    def drop(self, x: Tensor, place: str, row_keys: Tensor | None) -> Tensor:
        if self.site is None:
            return F.dropout(x, P)
        return x if row_keys is None else dropout(x, P, row_keys, f"{self.site}.{place}")


class TorchDrawing(Llama3):
    """Draws from torch's generators, like a model without support for row keys."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__(config)
        for index in range(config.n_layers):
            self.layers[str(index)] = DrawingBlock(config, f"layers.{index}" if self.draws else None)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        row_keys: Tensor | None = None,
        labels: Tensor | None = None,
        num_valid: Tensor | None = None,
    ) -> Tensor:
        rope = self.rope(positions)
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        mask = self.attention_mask(document_ids, x.dtype, self.config.head_dim)
        for layer in self.layers.values():
            x = layer(x, rope, mask, row_keys)
        x = x if self.norm is None else self.norm(x)
        return x if self.output is None else self.output(x, labels, num_valid)


class Drawing(TorchDrawing):
    """Draws by row key."""

    draws: ClassVar[bool] = True


@contextmanager
def drawing_families() -> Iterator[None]:
    """Register the families "drawing" and "torch_drawing" within the context."""
    added = {"drawing": replace(LLAMA3, name="drawing", build=Drawing)}
    added["torch_drawing"] = replace(LLAMA3, name="torch_drawing", build=TorchDrawing)
    FAMILIES.update(added)
    try:
        yield
    finally:
        for name in added:
            del FAMILIES[name]
