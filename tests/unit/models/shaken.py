"""Models in which every parameter matters: no parameter is near zero, no norm is 1."""

from typing import Any

import torch

from titanlite.models.experts import mixtures_of
from titanlite.models.family import Family, LanguageModel
from titanlite.models.init import init_parameters_
from titanlite.models.registry import structure_of


def perturbed_model(family: Family, config: Any) -> LanguageModel:
    """A float64 model with weights of order 1: clearly nonlinear, and no two parameters are interchangeable."""
    model = family.build(config).to(torch.float64)
    model.init_buffers(torch.device("cpu"))
    init_parameters_(model, 1, structure_of(family, config, model).init)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.3)
        for mixture in mixtures_of([model]):
            if mixture.bias is not None:
                mixture.bias += 0.1 * torch.randn(mixture.bias.shape, generator=generator)
    return model
