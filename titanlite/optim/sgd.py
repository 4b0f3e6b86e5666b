"""SGD, with momentum if optimizer.momentum is above 0 (Sutskever et al., "On the importance of initialization and
momentum in deep learning", 2013, in torch's form: momentum <- decay * momentum + gradient)."""

import torch

from titanlite.optim.optimizer import Arguments, OptimizerKind, without_compiler

EagerSGD = without_compiler(torch.optim.SGD)


def build(arguments: Arguments) -> torch.optim.SGD:
    """torch has no fused SGD for sharded parameters.

    On a CPU, foreach is no faster, and takes seconds on a mesh of several axes, where DTensor tries all placements. In
    float32 and float64, both forms have the same bits; in bfloat16 they round differently.
    """
    (_, first), *_ = arguments.groups[0]["params"]
    foreach = arguments.device.type != "cpu" or first.dtype not in (torch.float32, torch.float64)
    return EagerSGD(arguments.groups, lr=arguments.section.lr, foreach=foreach)


SGD = OptimizerKind(build, options=("momentum",))
