"""Llama 3 that notes the entropy of the attention of its layer 3, in nats, as watch/entropy/3. Use it with

[job]
plugins = ["watched.py"]
[model]
family = "watched"
"""

from torch import Tensor, special

import titanlite
from titanlite.models.attention import AttentionMask, attend, attention_weights
from titanlite.models.llama3 import LLAMA3, Llama3, Llama3Config


def attend_and_note(queries: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask | None) -> Tensor:
    titanlite.watch("entropy/3", special.entr(attention_weights(queries, keys, mask)).sum(-1).mean(1))
    return attend(queries, keys, values, mask)


def build(config: Llama3Config) -> Llama3:
    model = Llama3(config)
    model.layers["3"].attention.attend = attend_and_note
    return model


titanlite.register_family(LLAMA3.variant("watched", build))
