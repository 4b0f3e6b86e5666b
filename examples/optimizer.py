"""An optimizer: torch's RAdam (Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond", 2020).

Use it with

    [job]
    plugins = ["optimizer.py"]
    [optimizer]
    name = "RAdam"
"""

import torch

import titanlite
from titanlite.optim.optimizer import Arguments, OptimizerKind


def build(arguments: Arguments) -> torch.optim.Optimizer:
    """The groups have betas and weight_decay already; each step sets their lr.

    Parameters are plain tensors or DTensors, and so is the state. An update that must not happen (a gradient that is
    not finite) is undone by titanlite, which keeps a copy of weights and state for it; a SkippingOptimizer of
    titanlite.optim.optimizer needs no copy.
    """
    section = arguments.section
    return torch.optim.RAdam(arguments.groups, lr=section.lr, eps=section.eps, decoupled_weight_decay=True)


titanlite.register_optimizer("RAdam", OptimizerKind(build, options=("beta1", "beta2")))
