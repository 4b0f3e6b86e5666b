"""Llama 3 with gated short convolutions in place of attention in every second layer (Liquid AI, "LFM2", 2025):

[job]
plugins = ["short_convolution.py"]
[model]
family = "short_convolution"
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import titanlite
from titanlite.models.decoder import Block
from titanlite.models.family import Init
from titanlite.models.layers import OfHeads
from titanlite.models.linear_attention import convolve, document_starts
from titanlite.models.llama3 import LLAMA3, Llama3, Llama3Config, attention
from titanlite.models.mixer import Mixer, Reading
from titanlite.models.parts import Column, Role, Row

TAPS = 3


class ShortConvolution(Mixer):
    """wo(c * convolution of (b * x)), of gates b and c."""

    sees, gathers = "starts", True

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.width = dim // n_heads
        self.wb, self.wc, self.wx = (Column(dim, dim, bias=False) for _ in range(3))
        self.taps = OfHeads(dim, Role(Init("normal", 0.5), "unknown"))
        self.taps.weight = nn.Parameter(torch.empty(dim, 1, TAPS))
        self.wo = Row(dim, dim, bias=False)

    def forward(self, x: Tensor, _rope: Any, starts: Tensor | None) -> Tensor:
        b, c, x = (linear(x).unflatten(-1, (-1, self.width)) for linear in (self.wb, self.wc, self.wx))
        out: Tensor = self.wo((c * self.core((b * x,), starts, {"taps": self.taps()})).flatten(2))
        return out

    def core(self, inputs: Sequence[Tensor], seen: Tensor | None, by_head: Mapping[str, Tensor]) -> Tensor:
        return convolve(inputs[0], by_head["taps"], seen)

    def cache(self, reading: Reading) -> "LastInputs":
        return LastInputs(reading)

    def context(self, document_ids: Tensor | None, *_: Any) -> Tensor | None:
        return document_starts(document_ids)


class LastInputs:
    """In place of the core while tokens are generated: it keeps the inputs that the next position sees."""

    def __init__(self, reading: Reading) -> None:
        self.reading, self.end = reading, 0

    def has_window_before(self, column: int) -> bool:
        return column == self.end

    def __call__(self, inputs: Sequence[Tensor], _seen: None, by_head: Mapping[str, Tensor]) -> Tensor:
        begin = self.reading.columns
        read = torch.cat((self.last, inputs[0]), dim=1) if begin else inputs[0]
        self.last, self.end = read[:, 1 - TAPS :], begin + inputs[0].shape[1]
        columns = torch.arange(self.end - read.shape[1], self.end, device=read.device)
        out = convolve(read, by_head["taps"], columns == self.reading.padding)
        return out[:, -inputs[0].shape[1] :]


def build(config: Llama3Config) -> Llama3:
    def block(index: int) -> Block:
        return Block(config, attention(config) if index % 2 else ShortConvolution(config.dim, config.n_heads))

    return Llama3(config, block)


titanlite.register_family(LLAMA3.variant("short_convolution", build))
