"""Llama 3 that notes the entropy of the attention of its layer 3, in nats, as watch/entropy/3. Use it with

[job]
plugins = ["watched.py"]
[model]
family = "watched"
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import titanlite
from titanlite.models.attention import attend
from titanlite.models.llama3 import LLAMA3, Llama3


def attend_and_note(queries: Tensor, keys: Tensor, values: Tensor, mask: Any) -> Tensor:
    all_keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    scores = (queries @ all_keys.mT / queries.shape[-1] ** 0.5).detach()
    visible = torch.full_like(scores, -torch.inf).triu(1) if mask is None else mask
    titanlite.watch("entropy/3", torch.special.entr((scores + visible).softmax(-1)).sum(-1).mean(1))
    return attend(queries, keys, values, mask)


def build(config: Any) -> Llama3:
    model = Llama3(config)
    model.layers["3"].attention.attend = attend_and_note
    return model


titanlite.register_family(replace(LLAMA3, name="watched", build=build))
