"""Build the optimizer of a small model."""

import torch
from torch import nn

from titanlite.models.family import Structure
from titanlite.models.parts import SCORES
from titanlite.optim.optimizer import GatedOptimizer, OptimizerConfig
from titanlite.optim.registry import build_optimizer
from titanlite.parallel.mesh import ShardGroups

STRUCTURE = Structure((), {"block": 0}, roles={"block.router.weight": SCORES})
"""The parameters of the module "block" are those of a transformer block."""


def optimizer_of(model: nn.Module, section: OptimizerConfig, structure: Structure = STRUCTURE) -> GatedOptimizer:
    named = dict(model.named_parameters())
    return build_optimizer(section, named, structure, torch.device("cpu"), ShardGroups(), 0)
