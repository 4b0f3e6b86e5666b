"""A model whose next token depends on all tokens before it, and prompts of unequal length."""

from dataclasses import replace
from typing import cast

import torch

from tests.unit.models.shaken import perturbed_model
from titanlite.models.llama3 import LLAMA3, Llama3, Llama3Config

CONFIG = Llama3Config(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=48,
    vocab_size=61,
    norm_eps=1e-3,
    rope_theta=1000.0,
    rope_scaling_factor=8.0,
    rope_low_freq_factor=1.5,
    rope_high_freq_factor=3.0,
    rope_original_seq_len=16,
    max_seq_len=96,
)
PROMPTS = [[7, 3, 50, 12, 12, 9, 33, 4, 21], [5], [60, 59, 1, 0, 2], [8, 8, 8]]


def tiny(dtype: torch.dtype = torch.float64, **changes: int | float | bool) -> Llama3:
    """A model that is far from linear, so that tokens do not repeat soon."""
    model = perturbed_model(LLAMA3, replace(CONFIG, **changes)).to(dtype)
    model.init_buffers(torch.device("cpu"))
    return cast("Llama3", model.eval())
