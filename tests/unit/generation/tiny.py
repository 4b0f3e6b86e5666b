"""A model whose next token depends on all tokens before it, and prompts of unequal length."""

from dataclasses import replace
from functools import partial

import torch

from titanlite.models.init import init_parameters_
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
    """A model with weights of order 1 and norms other than 1: far from linear, so that tokens do not repeat soon."""
    config = replace(CONFIG, **changes)
    model = Llama3(config).to(dtype)
    model.init_buffers(torch.device("cpu"))
    init_parameters_(model, 1, partial(LLAMA3.init, config))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype), alpha=0.3)
    return model.eval()
