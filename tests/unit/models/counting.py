"""Parameter counts without building all blocks of a model."""

from dataclasses import replace
from typing import Any

import torch

from titanlite.models.family import Family


def count_parameters(family: Family, config: Any) -> int:
    """Count a configuration's parameters from models of one and two blocks on the meta device; all blocks are alike."""
    counts = []
    for n_layers in (1, 2):
        with torch.device("meta"):
            model = family.build(replace(config, n_layers=n_layers))
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
    one, two = counts
    return one + (config.n_layers - 1) * (two - one)
